"""Where the rows of a step lie, as tensors on the model's device: what the kernels of recurrent states read."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

# Of `MambaRows`, as kernels name them: views that begin anywhere, of which one binary must serve all.
ROW_POINTERS = ["p_query_start", "p_query_len", "p_conv_block", "p_conv_offset", "p_temporal_block", "p_is_decode"]
ROW_POINTERS += ["p_state_block"]
# The same, of the numbers that the kernels around a step read.
STEP_POINTERS = ["p_idx_mapping", "p_num_kept", "p_num_computed", "p_num_scheduled", "p_num_accepted"]
STEP_POINTERS += ["p_running_column"]


@dataclass(frozen=True)
class MambaRows:
    """R rows over T tokens. A row with `query_len` 0 is inert; a token of no row is padding: neither reads nor writes.

    No two rows of a step touch the same block. Host values describe a launch and change no bits.
    """

    query_start: torch.Tensor  # int32 [R], first token of the row
    query_len: torch.Tensor  # int32 [R]
    max_query_len: int  # an upper bound of query_len
    conv_block: torch.Tensor  # int32 [R], holds the conv window that the row reads, and then the one that it leaves
    conv_offset: torch.Tensor  # int32 [R], slot at which the window starts: num_accepted - 1; 0 for prefill rows
    temporal_block: torch.Tensor  # int32 [R], state that the row continues from; -1: zeros, and no window either
    is_decode: torch.Tensor  # int32 [R], 1: conv slots are left with the inputs of drafts behind the window
    state_block: torch.Tensor  # int32 [T], where the temporal state after the token is left; -1: not kept
    all_decode: bool  # every row that is not inert has is_decode 1

    def __post_init__(self):
        of_rows = (self.query_start, self.query_len, self.conv_block, self.conv_offset)
        of_rows += (self.temporal_block, self.is_decode)
        for field in (*of_rows, self.state_block):  # kernels take addresses
            assert field.dtype == torch.int32 and field.is_contiguous(), (field.dtype, field.stride())
        assert len({field.shape for field in of_rows}) == 1, [field.shape for field in of_rows]


@dataclass(frozen=True)
class ScanRows:
    """A step's rows by how recurrent layers run them. In each part the rows of the other one are inert."""

    by_token: MambaRows | None  # None: no row
    by_chunk: MambaRows | None

    @classmethod
    def split(cls, rows: MambaRows, is_by_chunk: torch.Tensor | None, num_by_chunk: int) -> "ScanRows":
        """is_by_chunk int32 [R], `num_by_chunk` of its entries are 1; None without any."""
        if num_by_chunk == 0:
            return cls(rows, None)
        if num_by_chunk == len(rows.query_len):
            return cls(None, rows)
        by_chunk = rows.query_len * is_by_chunk
        return cls(replace(rows, query_len=rows.query_len - by_chunk), replace(rows, query_len=by_chunk))

    def run(self, by_token: Callable[..., torch.Tensor], by_chunk: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Outputs [T, ..] of both parts: `by_token(rows)` makes them, `by_chunk(rows, outputs)` adds to them."""
        outputs = None if self.by_token is None else by_token(self.by_token)
        return outputs if self.by_chunk is None else by_chunk(self.by_chunk, outputs)


def walk_rows(
    rows: MambaRows,
    temporal_state: torch.Tensor,
    advance: Callable[[int, int, torch.Tensor], torch.Tensor],
    piece_tokens: int = 1,
) -> None:
    """How the torch references of recurrences run rows: from the state in temporal_block, or zeros, piece after piece.

    advance(start, stop, state) -> the state, fp32, behind the step's tokens start .. stop - 1: a piece, of at most
    `piece_tokens`. It is rounded to the dtype of temporal_state [blocks, ..] then, and left in state_block of the
    piece's last token, if that is not negative.
    """
    starts, lengths, kept_blocks = rows.query_start.tolist(), rows.query_len.tolist(), rows.state_block.tolist()
    for start, length, block in zip(starts, lengths, rows.temporal_block.tolist(), strict=True):
        state = torch.zeros(temporal_state.shape[1:], dtype=torch.float32, device=temporal_state.device)
        if length > 0 and block >= 0:
            state = temporal_state[block].float()
        for first in range(start, start + length, piece_tokens):
            stop = min(first + piece_tokens, start + length)
            rounded = advance(first, stop, state).to(temporal_state.dtype)
            state = rounded.float()
            if kept_blocks[stop - 1] >= 0:
                temporal_state[kept_blocks[stop - 1]] = rounded
