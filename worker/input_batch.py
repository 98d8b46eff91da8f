"""The V1 runner's persistent batch: one row a live request, dense, compacted when a request leaves.

Owns every per-request number that outlives a step. A row's index may change when another request leaves; nothing
outside may keep it over a step.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from mambalign.kernels.sampling import NO_BEST
from mambalign.worker.batch import NewRow, ScheduledRow
from mambalign.worker.grammar import GrammarState
from mambalign.worker.mamba_columns import NULL_BLOCK, first_column
from mambalign.worker.mamba_laws import RowBefore
from mambalign.worker.sampler import NOT_NUMBERS
from mambalign.worker.sampling_params import SamplingParams, TokenLogprobs


@dataclass
class CachedRequest:
    """What a runner remembers of a request's text: all known tokens, and how to sample the next."""

    request_id: str
    params: SamplingParams
    choice: int
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)  # of the next step; V2: behind a step not yet read, old
    grammar: GrammarState | None = None  # made with the first sample, if the request has one

    def error_after(self, token_ids: list[int], of_prompt: list[TokenLogprobs]) -> str | None:
        """Why the request cannot go on after a step that gave it these tokens, and these of its prompt."""
        if NO_BEST.value in token_ids or any(math.isnan(entry.logprob) for entry in of_prompt):
            return NOT_NUMBERS
        return f"structured output: {self.grammar.error}" if self.grammar and self.grammar.error else None

    @classmethod
    def from_new_row(cls, new: NewRow) -> "CachedRequest":
        split = new.num_prompt_tokens
        return cls(new.request_id, new.params, new.choice, new.token_ids[:split], new.token_ids[split:])


class InputBatch:
    """Rows 0 .. num_reqs-1 are live. Arrays are int32, `[max_num_reqs]`; the block table `[max_num_reqs, width]`."""

    def __init__(self, max_num_reqs: int, mamba_table_width: int, mamba_block_tokens: int):
        self.mamba_block_tokens = mamba_block_tokens
        self.requests: list[CachedRequest] = []
        self.row_of: dict[str, int] = {}
        self.num_accepted = np.ones(max_num_reqs, np.int32)
        self.mamba_state_idx = np.full(max_num_reqs, -1, np.int32)  # running column
        self.mamba_block_table = np.full((max_num_reqs, mamba_table_width), NULL_BLOCK, np.int32)

    @property
    def num_reqs(self) -> int:
        return len(self.requests)

    def add(self, new: NewRow) -> None:
        """Append a request; its state is the checkpoint it resumes from, if any."""
        assert new.request_id not in self.row_of, f"{new.request_id} is in the batch already"
        row = self.num_reqs
        self.requests.append(CachedRequest.from_new_row(new))
        self.row_of[new.request_id] = row
        self.num_accepted[row] = 1
        self.mamba_state_idx[row] = first_column(new.num_computed_tokens, self.mamba_block_tokens)
        self.mamba_block_table[row] = NULL_BLOCK

    def remove(self, request_id: str) -> None:
        """Drop a request; the last row moves into its place, with everything that belongs to it."""
        row, last = self.row_of.pop(request_id), self.num_reqs - 1
        if row != last:
            self.requests[row] = self.requests[last]
            self.row_of[self.requests[row].request_id] = row
            self.num_accepted[row] = self.num_accepted[last]
            self.mamba_state_idx[row] = self.mamba_state_idx[last]
            self.mamba_block_table[row] = self.mamba_block_table[last]
        self.requests.pop()

    def set_blocks(self, scheduled: ScheduledRow) -> int:
        """Write the columns that a row holds in this step into the block table; returns the batch row."""
        row = self.row_of[scheduled.request_id]
        table = self.mamba_block_table[row]
        table.fill(NULL_BLOCK)
        table[list(scheduled.mamba_blocks)] = list(scheduled.mamba_blocks.values())
        return row

    def rows_before(self, rows: list[ScheduledRow]) -> list[RowBefore]:
        """What a step starts from, one a scheduled row; their blocks are set."""
        batch_rows = [self.row_of[scheduled.request_id] for scheduled in rows]
        return [
            RowBefore(
                scheduled.request_id,
                int(self.mamba_state_idx[row]),
                scheduled.num_computed_tokens,
                scheduled.num_tokens,
                int(self.num_accepted[row]),
                self.mamba_block_table[row],
            )
            for row, scheduled in zip(batch_rows, rows, strict=True)
        ]
