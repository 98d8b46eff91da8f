"""Where a step's tokens lie: positions and KV slots, and the state blocks that rows read and tokens leave.

A row's numbers are int32 [R], tables int32 [R, columns] of block ids, a token's row and offset within it int64 [T].
A token behind its row's last belongs to nobody: it gets -1, which is written nowhere. DESIGN section 2 says what a row
reads and leaves. Integers only; on a GPU each function is one launch.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.rows import Deferral, may_defer

BLOCK = 128
NOWHERE = -1


@triton.jit(
    do_not_specialize=["num_tokens", "columns"],
    do_not_specialize_on_alignment=["p_row", "p_offset", "p_first", "p_length", "p_table", "p_position", "p_slot"],
)
def token_slots_kernel(
    p_row, p_offset, p_first, p_length, p_table, p_position, p_slot, num_tokens, columns,
    KV_BLOCK: tl.constexpr, ONE_EACH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """position = first[row] + offset; slot = table[row, position // KV_BLOCK] * KV_BLOCK + position % KV_BLOCK, or -1.

    Grid: blocks of BLOCK tokens. ONE_EACH: token t is row t's only one. Writes position and slot, int64.
    """
    wait_for_inputs(PDL)
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_t < num_tokens
    if ONE_EACH:
        b_row, b_offset = o_t, tl.zeros([BLOCK], tl.int32)
    else:
        b_row = tl.load(p_row + o_t, mask=mask, other=0)
        b_offset = tl.load(p_offset + o_t, mask=mask, other=0).to(tl.int32)
    is_own = mask & (b_offset < tl.load(p_length + b_row, mask=mask, other=0))
    b_position = tl.load(p_first + b_row, mask=mask, other=0) + b_offset
    b_column = tl.minimum(b_position // KV_BLOCK, columns - 1)
    b_block = tl.load(p_table + b_row.to(tl.int64) * columns + b_column, mask=is_own, other=0).to(tl.int64)
    tl.store(p_position + o_t, b_position.to(tl.int64), mask=mask)
    tl.store(p_slot + o_t, tl.where(is_own, b_block * KV_BLOCK + b_position % KV_BLOCK, -1), mask=mask)


@triton.jit
def _may_defer(b_tokens, block_tokens, num_spec_tokens):
    """`may_defer`, of a vector."""
    ahead = 2 * num_spec_tokens + 1
    return b_tokens // block_tokens == (b_tokens + ahead) // block_tokens


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "columns", "num_spec_tokens", "defer_within"],
    do_not_specialize_on_alignment=[
        "p_row", "p_offset", "p_boundary", "p_query_len", "p_is_decode", "p_computed", "p_column", "p_accepted",
        "p_table", "p_state", "p_conv", "p_temporal", "p_conv_offset", "p_is_deferring", "p_num_replays", "p_replay",
    ],
)  # fmt: skip
def state_blocks_kernel(
    p_row, p_offset, p_boundary, p_query_len, p_is_decode, p_computed, p_column, p_accepted, p_table,
    p_state, p_conv, p_temporal, p_conv_offset, p_is_deferring, p_num_replays, p_replay,
    num_tokens, num_rows, columns, num_spec_tokens, defer_within,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Per token the block that its state is left in, or -1; per row its running block, its live one or -1, its bias,
    and what it defers and runs again.

    Grid: blocks of BLOCK tokens and rows. Writes int32.
    """
    wait_for_inputs(PDL)
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_i < num_tokens
    b_row, b_offset = tl.load(p_row + o_i, mask=mask, other=0), tl.load(p_offset + o_i, mask=mask, other=0).to(tl.int32)
    b_len = tl.load(p_query_len + b_row, mask=mask, other=0)
    is_own = mask & (b_offset < b_len)
    is_decode = tl.load(p_is_decode + b_row, mask=mask, other=0) != 0
    b_column = tl.load(p_column + b_row, mask=mask, other=0) + tl.where(is_decode, b_offset, 0)
    b_column = tl.minimum(b_column, columns - 1)
    b_block = tl.load(p_table + b_row.to(tl.int64) * columns + b_column, mask=is_own, other=0)
    b_boundary = tl.load(p_boundary + o_i, mask=mask, other=-1).to(tl.int32)
    b_state = tl.where(is_decode | (b_offset == b_len - 1), b_block, b_boundary)
    tl.store(p_state + o_i, tl.where(is_own, b_state, -1), mask=mask)

    mask = o_i < num_rows
    b_column, b_bias = tl.load(p_column + o_i, mask=mask, other=0), tl.load(p_accepted + o_i, mask=mask, other=1) - 1
    p_blocks = p_table + o_i.to(tl.int64) * columns + b_column
    tl.store(p_conv + o_i, tl.load(p_blocks, mask=mask, other=0), mask=mask)
    tl.store(p_conv_offset + o_i, b_bias, mask=mask)
    b_computed = tl.load(p_computed + o_i, mask=mask, other=0)
    b_before = b_computed - 1 - b_bias  # tokens before the last step
    has_deferred = (b_bias > 0) & _may_defer(b_before, defer_within, num_spec_tokens)
    b_live = tl.load(p_blocks + tl.where(has_deferred, 0, tl.maximum(b_bias, 0)), mask=mask, other=0)
    tl.store(p_temporal + o_i, tl.where(b_computed > 0, b_live, -1), mask=mask)
    defers = _may_defer(b_computed, defer_within, num_spec_tokens)
    defers &= tl.load(p_is_decode + o_i, mask=mask, other=0) != 0
    tl.store(p_is_deferring + o_i, defers.to(tl.int32), mask=mask)
    tl.store(p_num_replays + o_i, tl.where(has_deferred, b_bias, 0), mask=mask)
    for i in range(0, num_spec_tokens):
        b_block = tl.load(p_blocks + 1 + i, mask=mask & (b_column + 1 + i < columns), other=0)
        tl.store(p_replay + o_i.to(tl.int64) * num_spec_tokens + i, b_block, mask=mask)


def token_slots_reference(
    row: torch.Tensor | None,
    offset: torch.Tensor | None,
    first: torch.Tensor,
    length: torch.Tensor,
    kv_table: torch.Tensor,
    kv_block_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and KV slots (block id * kv_block_tokens + offset), int64 [T], of tokens `first[row] + offset`.

    row, offset: None when each row has one token. first, length [R]: of a row's tokens, `length` are its own.
    """
    if row is None:
        row = torch.arange(len(first), device=first.device)
        offset = torch.zeros_like(row)
    positions = first[row] + offset
    column = (positions // kv_block_tokens).clamp_(max=kv_table.shape[1] - 1)
    slots = kv_table[row, column].long() * kv_block_tokens + positions % kv_block_tokens
    return positions, slots.masked_fill_(offset >= length[row], NOWHERE)


def state_blocks_reference(
    row: torch.Tensor,
    offset: torch.Tensor,
    boundary_block: torch.Tensor,
    query_len: torch.Tensor,
    is_decode: torch.Tensor,
    num_computed: torch.Tensor,
    running_column: torch.Tensor,
    num_accepted: torch.Tensor,
    table: torch.Tensor,
    num_spec_tokens: int,
    defer_within: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Deferral]:
    """state_block [T], conv_block [R], temporal_block [R], conv_offset [R], int32, and who defers: as in `MambaRows`.

    boundary_block int64 [T]: where a prompt's token leaves its state, or -1; its row's last goes to the running block.
    defer_within: `block_tokens` of `may_defer`. A row's last step deferred if more than its first token was kept, which
    only a decode row's has, and it might: the tokens that it kept tell where it began.
    """
    running, bias = running_column.long()[:, None], num_accepted - 1
    conv_block = table.gather(1, running)[:, 0]
    has_deferred = (bias > 0) & may_defer(num_computed - num_accepted, defer_within, num_spec_tokens)
    replays = bias.where(has_deferred, torch.zeros_like(bias))
    live = table.gather(1, running + (bias - replays).clamp(min=0)[:, None])[:, 0]  # an inert row's count is 0
    left_in = table[row, (running[row, 0] + offset).clamp_(max=table.shape[1] - 1)]  # by a decode row's token
    of_prompt = torch.where(offset == query_len[row] - 1, conv_block[row], boundary_block)
    state_block = torch.where(is_decode[row] != 0, left_in, of_prompt).masked_fill_(offset >= query_len[row], NOWHERE)
    temporal_block = live.masked_fill(num_computed == 0, NOWHERE)
    defers = may_defer(num_computed, defer_within, num_spec_tokens) & (is_decode != 0)
    columns = running + torch.arange(1, num_spec_tokens + 1, device=table.device)
    replay_block = table.gather(1, columns.clamp(max=table.shape[1] - 1)).masked_fill_(columns >= table.shape[1], 0)
    return state_block.int(), conv_block, temporal_block, bias, Deferral(defers.int(), replays, replay_block)


def token_slots(row, offset, first, length, kv_table, kv_block_tokens):
    """`token_slots_reference`."""
    if first.is_cuda:
        return token_slots_on_gpu(row, offset, first, length, kv_table, kv_block_tokens)
    return token_slots_reference(row, offset, first, length, kv_table, kv_block_tokens)


def state_blocks(*arguments):
    """`state_blocks_reference`."""
    return (state_blocks_on_gpu if arguments[0].is_cuda else state_blocks_reference)(*arguments)


def token_slots_on_gpu(row, offset, first, length, kv_table, kv_block_tokens):
    """`token_slots_reference` by its kernel."""
    num_tokens, columns = len(first if row is None else row), kv_table.shape[1]
    assert kv_table.is_contiguous() and first.is_contiguous() and length.is_contiguous()
    positions, slots = torch.empty(2, num_tokens, dtype=torch.int64, device=first.device)
    token_slots_kernel[(triton.cdiv(num_tokens, BLOCK),)](
        row, offset, first, length, kv_table, positions, slots, num_tokens, columns, kv_block_tokens, row is None,
        BLOCK, **pdl(first.device),
    )  # fmt: skip
    return positions, slots


def state_blocks_on_gpu(
    row, offset, boundary_block, query_len, is_decode, num_computed, running_column, num_accepted, table,
    num_spec_tokens, defer_within,
):  # fmt: skip
    """`state_blocks_reference` by its kernel."""
    num_tokens, (num_rows, columns) = len(row), table.shape
    numbers = (query_len, is_decode, num_computed, running_column, num_accepted, table)
    assert all(each.is_contiguous() and each.dtype == torch.int32 for each in numbers)
    state = torch.empty(num_tokens, dtype=torch.int32, device=table.device)
    of_rows = torch.empty(5, num_rows, dtype=torch.int32, device=table.device)
    replay_block = torch.empty(num_rows, num_spec_tokens, dtype=torch.int32, device=table.device)
    state_blocks_kernel[(triton.cdiv(max(num_tokens, num_rows), BLOCK),)](
        row, offset, boundary_block, *numbers, state, *of_rows, replay_block,
        num_tokens, num_rows, columns, num_spec_tokens, defer_within, BLOCK, **pdl(table.device),
    )  # fmt: skip
    return state, *of_rows[:3], Deferral(of_rows[3], of_rows[4], replay_block)
