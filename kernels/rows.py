"""Where the rows of a step lie, as tensors on the model's device: what the kernels of recurrent states read."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

# Of `MambaRows`, as kernels name them: views that begin anywhere, of which one binary must serve all.
ROW_POINTERS = ["p_query_start", "p_query_len", "p_conv_block", "p_conv_offset", "p_temporal_block", "p_is_decode"]
ROW_POINTERS += ["p_state_block", "p_is_deferring", "p_num_replays", "p_replay_block"]
# The same, of the numbers that the kernels around a step read.
STEP_POINTERS = ["p_idx_mapping", "p_num_kept", "p_num_computed", "p_num_scheduled", "p_num_accepted"]
STEP_POINTERS += ["p_running_column"]


def may_defer(num_computed: int | torch.Tensor, block_tokens: int, num_spec_tokens: int) -> bool | torch.Tensor:
    """Whether a decode row with `num_computed` tokens before a step may leave its drafts' inputs, not their states.

    So that nothing copies the state after a draft, this step and the next, of S+1 tokens each, have to stay within one
    block: a copy is owed by a step that reaches a boundary, and by the next where that one would pass it. For integers
    and tensors of them; `block_tokens` 1: never.
    """
    return num_computed // block_tokens == (num_computed + 2 * num_spec_tokens + 1) // block_tokens


@dataclass(frozen=True)
class Deferral:
    """Temporal states of drafts that are not left, of R rows: they come of their inputs, if ever they are needed.

    A row that defers leaves the state after its first token, in state_block, and behind it, in the state_block of each
    draft, what the recurrence takes of that token. Its next step runs those that were kept again, from the state that
    was left, before its own tokens: one state is written a step, not S+1. The bits are the same, since the recurrence
    takes the same values in the same order.
    """

    is_deferring: torch.Tensor  # int32 [R], 1: the row leaves its drafts' inputs
    num_replays: torch.Tensor  # int32 [R], drafts whose inputs it runs first; 0 when it did not defer last time
    replay_block: torch.Tensor  # int32 [R, S], where those lie, in order

    @classmethod
    def none(cls, num_rows: int, device: torch.device | str) -> "Deferral":
        zeros = torch.zeros(num_rows, dtype=torch.int32, device=device)
        return cls(zeros, zeros, torch.empty(num_rows, 0, dtype=torch.int32, device=device))


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
    deferral: Deferral | None = None  # None: no row defers, or did

    def __post_init__(self):
        if self.deferral is None:
            object.__setattr__(self, "deferral", Deferral.none(len(self.query_len), self.query_len.device))
        of_rows = (self.query_start, self.query_len, self.conv_block, self.conv_offset)
        of_rows += (self.temporal_block, self.is_decode, self.deferral.is_deferring, self.deferral.num_replays)
        for field in (*of_rows, self.state_block, self.deferral.replay_block):  # kernels take addresses
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
    """How the torch references of chunked scans run rows: from the state in temporal_block, or zeros, by pieces.

    advance(start, stop, state) -> the state, fp32, behind the step's tokens start .. stop - 1: a piece, of at most
    `piece_tokens`. It is rounded to the dtype of temporal_state [blocks, ..] then, and left in state_block of the
    piece's last token, if that is not negative.
    """
    kept_blocks = rows.state_block.tolist()
    for start, length, state in _first_states(rows, temporal_state):
        for first in range(start, start + length, piece_tokens):
            stop = min(first + piece_tokens, start + length)
            rounded = advance(first, stop, state).to(temporal_state.dtype)
            state = rounded.float()
            if kept_blocks[stop - 1] >= 0:
                temporal_state[kept_blocks[stop - 1]] = rounded


def walk_tokens(
    rows: MambaRows,
    temporal_state: torch.Tensor,
    inputs: Callable[[int], tuple[torch.Tensor, ...]],
    advance: Callable[..., torch.Tensor],
    emit: Callable[[int, torch.Tensor], None],
) -> None:
    """How the torch references of recurrences run rows: token after token, those that were deferred first.

    inputs(token) -> what the state takes of a token, fp32; advance(state, *inputs) -> the state behind it, fp32, which
    emit(token, state) makes the token's output of. It is then rounded to the dtype of temporal_state [blocks, ..].
    """
    kept_blocks, dtype = rows.state_block.tolist(), temporal_state.dtype
    of_rows = (rows.deferral.is_deferring.tolist(), rows.deferral.num_replays.tolist())
    replay_blocks = rows.deferral.replay_block.tolist()
    walked = zip(_first_states(rows, temporal_state), *of_rows, replay_blocks, strict=True)
    for (start, length, state), is_deferring, num_replays, blocks in walked:
        for block in blocks[: num_replays if length else 0]:
            state = advance(state, *_left_inputs(temporal_state[block], inputs(start))).to(dtype).float()
        for token in range(start, start + length):
            given, kept = inputs(token), kept_blocks[token]
            state = advance(state, *given)
            emit(token, state)
            state = state.to(dtype).float()
            if kept >= 0 and is_deferring and token > start:
                flat = torch.cat([each.flatten() for each in given])
                _as_fp32(temporal_state[kept])[: len(flat)] = flat
            elif kept >= 0:
                temporal_state[kept] = state.to(dtype)


def _first_states(rows: MambaRows, temporal_state: torch.Tensor):
    """(first token, number of tokens, state in fp32) of each row."""
    of_rows = (rows.query_start.tolist(), rows.query_len.tolist(), rows.temporal_block.tolist())
    for start, length, block in zip(*of_rows, strict=True):
        state = torch.zeros(temporal_state.shape[1:], dtype=torch.float32, device=temporal_state.device)
        yield start, length, temporal_state[block].float() if length > 0 and block >= 0 else state


def _as_fp32(block: torch.Tensor) -> torch.Tensor:
    return block.view(-1).view(torch.float32)


def _left_inputs(block: torch.Tensor, like: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Inputs that lie in a state's block one after the other, in the shapes of `like`."""
    parts = _as_fp32(block)[: sum(each.numel() for each in like)].split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]
