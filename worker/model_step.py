"""What both runners do alike in a step: forward, sample and verify, draft. Knows rows, not batches or slots.

A runner brings each row's numbers (`StepRow`), moves states before and keeps boundary states after sampling.
"""

from dataclasses import dataclass

import torch

from mambalign.worker.batch import ScheduledRow
from mambalign.worker.forward_batch import Boundary, ForwardBatch, MambaBatch
from mambalign.worker.input_batch import CachedRequest
from mambalign.worker.mtp import DraftRow, MtpProposer, attention_batch
from mambalign.worker.sampler import Sampler, SampleRow, verify_drafts
from mambalign.worker.state_cache import StateCache


@dataclass(frozen=True)
class StepRow:
    """One row of a step as the forward pass needs it, after `preprocess_mamba`."""

    scheduled: ScheduledRow
    request: CachedRequest
    token_ids: list[int]  # q tokens
    num_computed_tokens: int  # n
    running_column: int
    num_accepted: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        return self.scheduled.is_decode


class ModelStep:
    """Runs the model over the rows of one step. `mtp` is None without MTP drafts; then no carry is kept."""

    def __init__(self, model, cache: StateCache, mtp: MtpProposer | None):
        self.model = model
        self.cache = cache
        self.mtp = mtp
        self.sampler = Sampler(model.eos_token_ids)
        self._carries: dict[int, torch.Tensor] = {}

    def forward(self, rows: list[StepRow]) -> torch.Tensor:
        """Hidden states [T, hidden] of all rows' tokens; leaves KV, states and carries in the cache."""
        batch = self._forward_batch(rows)
        if self.mtp is None:
            return self.model.forward(batch, self.cache)
        self._carries = self._read_carries(batch.mamba)
        hidden = self.model.forward(batch, self.cache)
        self._write_carries(batch.mamba, hidden)
        return hidden

    def _forward_batch(self, rows: list[StepRow]) -> ForwardBatch:
        lens = [row.num_tokens for row in rows]
        starts = [row.num_computed_tokens for row in rows]
        mamba = MambaBatch(
            query_lens=lens,
            is_decode=[row.is_decode for row in rows],
            has_state=[n > 0 for n in starts],
            running_column=[row.running_column for row in rows],
            num_accepted=[row.num_accepted for row in rows],
            block_table=[row.scheduled.mamba_blocks for row in rows],
            boundaries=[b for i, row in enumerate(rows) for b in self._boundaries(i, row)],
            conv_layout=self.cache.conv_layout,
        )
        return ForwardBatch(
            input_ids=torch.tensor([max(t, 0) for row in rows for t in row.token_ids]),  # a draft may be missing
            positions=torch.cat([torch.arange(n, n + q) for n, q in zip(starts, lens, strict=True)]),
            attention=attention_batch([r.scheduled.kv_blocks for r in rows], starts, lens, self.cache, first_key=0),
            mamba=mamba,
        )

    def _boundaries(self, i: int, row: StepRow) -> list[Boundary]:
        """Boundary states that the forward pass leaves beside the running one."""
        size, blocks = self.cache.mamba_block_tokens, row.scheduled.mamba_blocks
        columns = {m: m // size - 1 for m in row.scheduled.boundaries}
        return [
            Boundary(i, m - row.num_computed_tokens, blocks[column])
            for m, column in columns.items()
            if column != row.running_column
        ]

    # Carries: the hidden state of a row's last token, which the drafter needs to go on after a cache hit.

    def _read_carries(self, mamba: MambaBatch) -> dict[int, torch.Tensor]:
        """Carry of each prefill row that starts behind its text's beginning, before the pass overwrites it."""
        return {
            i: self.cache.carry[mamba.block_table[i][mamba.running_column[i]]].clone()
            for i in range(len(mamba.query_lens))
            if not mamba.is_decode[i] and mamba.has_state[i]
        }

    def _write_carries(self, mamba: MambaBatch, hidden: torch.Tensor) -> None:
        """A decode row leaves one in every column that it writes, a prefill row in its running one and boundaries."""
        blocks, sources, starts, start = [], [], [], 0
        for i, q in enumerate(mamba.query_lens):
            starts.append(start)
            column, table = mamba.running_column[i], mamba.block_table[i]
            if mamba.is_decode[i]:
                blocks += [table[column + j] for j in range(q)]
                sources += range(start, start + q)
            else:
                blocks.append(table[column])
                sources.append(start + q - 1)
            start += q
        for boundary in mamba.boundaries:
            blocks.append(boundary.block_id)
            sources.append(starts[boundary.row] + boundary.num_tokens - 1)
        self.cache.carry[blocks] = hidden[sources]

    def sample(self, rows: list[StepRow], hidden: torch.Tensor) -> tuple[list[list[int]], list[list | None]]:
        """Kept tokens of each row (none for an unfinished prompt), and their log-probabilities where asked for."""
        sources, sample_rows, counts, start = [], [], [], 0
        for row in rows:
            offsets = range(row.num_tokens) if row.is_decode else [row.num_tokens - 1] * row.scheduled.samples
            sources += [start + j for j in offsets]
            sample_rows += [self._sample_row(row, j) for j in offsets]
            counts.append(len(offsets))
            start += row.num_tokens
        if not sources:
            return [[] for _ in rows], [None for _ in rows]
        sampled = self.sampler(self.model.compute_logits(hidden[sources]), sample_rows)
        tokens, logprobs, at = [], [], 0
        for row, count in zip(rows, counts, strict=True):
            targets = sampled.token_ids[at : at + count]
            kept = verify_drafts([targets], [row.token_ids[1:]])[0] if row.is_decode else count
            tokens.append(targets[:kept])
            wanted = row.request.params.logprobs is not None and count
            logprobs.append(sampled.logprobs[at : at + kept] if wanted else None)
            at += count
        return tokens, logprobs

    def _sample_row(self, row: StepRow, j: int) -> SampleRow:
        """How the token after the row's j-th is taken: as if its drafts up to there had been sampled singly."""
        request = row.request
        drafts = row.token_ids[1 : j + 1] if row.is_decode else []
        history = request.output_token_ids + drafts if drafts else request.output_token_ids
        position = row.num_computed_tokens + j + 1
        return SampleRow(request.params, request.prompt_token_ids, history, position, request.choice)

    def propose_mtp(self, rows: list[StepRow], hidden: torch.Tensor, tokens: list[list[int]]) -> list[list[int]]:
        """Fill the drafter's slots for every token that the step committed, and draft for the rows that sampled."""
        draft_rows, start = [], 0
        for i, (row, kept) in enumerate(zip(rows, tokens, strict=True)):
            num_final = len(kept) if row.is_decode else row.num_tokens
            draft_rows.append(_draft_row(row, hidden[start : start + num_final], self._carries.get(i), kept))
            start += row.num_tokens
        return self.mtp.propose(draft_rows)


def _draft_row(row: StepRow, hidden: torch.Tensor, carry: torch.Tensor | None, kept: list[int]) -> DraftRow:
    """Drafter inputs for the tokens that this step committed: each token with the hidden state before it."""
    n, kv_blocks = row.num_computed_tokens, row.scheduled.kv_blocks
    if row.is_decode:
        return DraftRow(hidden, kept, n + 1, kv_blocks, wants_drafts=True)
    samples = row.scheduled.samples
    after = kept if samples else [row.scheduled.next_token_id]
    if carry is None:  # the text's beginning: slot 0 stays empty
        return DraftRow(hidden, row.token_ids[1:] + after, 1, kv_blocks, samples)
    return DraftRow(torch.cat([carry[None], hidden]), row.token_ids + after, n, kv_blocks, samples)
