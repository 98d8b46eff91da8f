"""The last piece of one prompt as a CUDA graph: what a request runs whose prompt is short, or cached but for its end.

Such a step is a long chain of launches over few tokens, so that the host is slower than the device. A graph runs one
row of a fixed number of tokens, which samples after its last; tokens behind that are inert, as in `DecodeGraph`.
"""

import torch

from mambalign.worker.forward_batch import NO_BLOCK, NO_TOKEN, StepLayout, StepRows
from mambalign.worker.padded_step import PaddedStep

SIZES = (32, 64, 128, 192, 256, 384, 512)  # tokens


class PromptGraph(PaddedStep):
    """One row of up to `num_tokens` tokens of a prompt: its inputs. by_chunk: how prompts are scanned."""

    def __init__(
        self,
        num_tokens: int,
        num_columns: int,
        num_kv_blocks: int,
        max_context_len: int,
        by_chunk: bool,
        device: torch.device,
    ):
        int32 = dict(dtype=torch.int32, device=device)
        tokens, row = torch.arange(num_tokens, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        numbers = torch.zeros(4, 1, **int32)
        self.num_final = torch.zeros(1, **int32)
        self.sampled = torch.zeros_like(row)
        layout = StepLayout(
            num_rows=1,
            num_tokens=num_tokens,
            num_samples=1,
            max_query_len=num_tokens,
            max_context_len=max_context_len,
            all_decode=False,
            query_start=torch.zeros(1, **int32),
            query_len=numbers[0],
            is_decode=torch.zeros(1, **int32),
            samples_of_row=torch.ones(1, **int32),
            sample_start=torch.zeros(1, **int32),
            drafting=row,
            resumed=row,
            resumed_len=torch.zeros(1, **int32),
            row_of_token=torch.zeros_like(tokens),
            offset_of_token=tokens,
            token_ids=torch.zeros_like(tokens),
            next_token_ids=torch.full_like(tokens, NO_TOKEN),
            boundary_block=torch.full_like(tokens, NO_BLOCK),
            sample_index=row.clone(),
            kv_table=torch.zeros(1, num_kv_blocks, **int32),
            is_by_chunk=torch.ones(1, **int32) if by_chunk else None,
            num_by_chunk=int(by_chunk),
        )
        super().__init__(layout, numbers, num_columns)

    def holds(self, layout: StepLayout) -> bool:
        """Whether a step is one such row."""
        mine = self.rows.layout
        return (
            layout.num_rows == layout.num_samples == 1
            and not layout.all_decode
            and layout.num_tokens <= mine.num_tokens
            and layout.num_by_chunk == mine.num_by_chunk
        )

    def load(self, rows: StepRows) -> None:
        """Copy a step in."""
        super().load(rows)
        given, layout, num_tokens = rows.layout, self.rows.layout, rows.layout.num_tokens
        layout.next_token_ids[:num_tokens].copy_(given.next_token_ids)
        layout.boundary_block[:num_tokens].copy_(given.boundary_block)
        layout.sample_index.copy_(given.sample_index)
        layout.resumed_len.fill_(len(given.resumed))

    def take(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """[T, ..] of the step's own tokens."""
        return of_tokens[: self._given.num_tokens]

    def put_sampled(self, sampled: torch.Tensor, num_final: torch.Tensor) -> None:
        """Copy in what the drafter's pass needs: the sampled token, int64 [1], and how many are final, int32 [1]."""
        self.sampled.copy_(sampled)
        self.num_final.copy_(num_final)
