"""Causal depthwise convolution over a paged conv state: the torch reference.

Formula: y_p = silu(bias + sum_k weight[k] * x_{p - (W-1) + k}), one channel at a time, taps added in order in fp32.

A row's conv state holds the W-1 inputs before its next token. Decode rows keep more: the state block of their
running column also has the inputs of the drafts, and their window starts at slot `num_accepted - 1`, so that
rejected drafts are simply not looked at. What each row reads and leaves is written down once a forward pass, as
index lists over an "extended" buffer in which a row's old window stands before its new inputs:

    extended row r:  [ W-1 inputs before the row | query_len inputs ]

Every layer then does the same: gather windows, append inputs, convolve, scatter slots.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mambalign.kernels.activation import silu
from mambalign.kernels.rows import MambaRows

PIECE = 256  # rows convolved at a time, so that they stay in the processor's cache


@dataclass(frozen=True)
class ConvPlan:
    """What each row reads and leaves, and index lists (int64) over the extended buffer; for all layers of one pass."""

    query_lens: list[int]  # [R]
    has_state: list[bool]  # [R]
    read_block: torch.Tensor  # [rows with state * (W-1)]
    read_slot: torch.Tensor
    write_index: torch.Tensor  # [.] inputs to keep in a state
    write_block: torch.Tensor
    write_slot: torch.Tensor
    output_index: torch.Tensor | None  # [T] where each token's output is; None for a single row


def plan_causal_conv1d(batch, conv_width: int, device: torch.device | str = "cpu") -> ConvPlan:
    """Lay out what every row of a `MambaBatch` reads from its conv state and leaves in one.

    Decode row: window in slots a-1 .. a+W-3 of the running column (a = num_accepted); afterwards slot i holds the
    input of position n-(W-2)+i, so the a oldest are gone and the new inputs follow. Prefill row: window in slots
    0 .. W-2; afterwards the last W-1 inputs. A boundary after m of the row's tokens gets the W-1 inputs before it.
    """
    window = conv_width - 1
    starts, start = [], 0
    reads, writes, outputs = [], [], []
    for row, query_len in enumerate(batch.query_lens):
        block = batch.block_table[row][batch.running_column[row]]
        starts.append(start)
        outputs.append(torch.arange(start, start + query_len))
        if batch.has_state[row]:
            first_slot = batch.num_accepted[row] - 1
            reads += [(block, first_slot + i) for i in range(window)]
        if batch.is_decode[row]:
            writes += [(start + 1 + i, block, i) for i in range(window - 1 + query_len)]
        else:
            writes += [(start + query_len + i, block, i) for i in range(window)]
        start += window + query_len
    for boundary in batch.boundaries:
        first = starts[boundary.row] + boundary.num_tokens
        writes += [(first + i, boundary.block_id, i) for i in range(window)]

    read = torch.tensor(reads, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    write = torch.tensor(writes, dtype=torch.int64, device=device).view(-1, 3).unbind(1)
    output_index = torch.cat(outputs).to(device) if len(outputs) > 1 else None
    return ConvPlan(batch.query_lens, batch.has_state, *read, *write, output_index)


def causal_conv1d(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    plan: ConvPlan,
    conv_layout: str,
) -> torch.Tensor:
    """Convolve x and apply silu; update `conv_state` in place.

    x [T, dim]; conv_state [blocks, state_len, dim] (SD) or [blocks, dim, state_len] (DS), in the dtype of x;
    weight [W, dim] and bias [dim] in fp32. Returns [T, dim] in the dtype of x. All reads come before all writes.
    """
    taps = weight.shape[0]
    slots = conv_state if conv_layout == "SD" else conv_state.transpose(1, 2)
    extended = _extend(x, slots, taps - 1, plan)
    slots[plan.write_block, plan.write_slot] = extended.index_select(0, plan.write_index)

    num_outputs = extended.shape[0] - (taps - 1)  # those that straddle two rows are dropped below
    out = x.new_empty(num_outputs, x.shape[1])
    for start in range(0, num_outputs, PIECE):
        stop = min(start + PIECE, num_outputs)
        inputs = extended[start : stop + taps - 1].float()
        sums = torch.addcmul(bias, inputs[: stop - start], weight[0])
        for tap in range(1, taps):
            sums.addcmul_(inputs[tap : tap + stop - start], weight[tap])
        out[start:stop] = silu(sums)
    return out if plan.output_index is None else out.index_select(0, plan.output_index)


def _extend(x: torch.Tensor, slots: torch.Tensor, window: int, plan: ConvPlan) -> torch.Tensor:
    """[sum over rows of window + query_len, dim]: each row's old window, then its inputs."""
    windows = iter(slots[plan.read_block, plan.read_slot].split(window))
    zeros = x.new_zeros(window, x.shape[1])
    pieces = []
    for has_state, inputs in zip(plan.has_state, x.split(plan.query_lens), strict=True):
        pieces += [next(windows) if has_state else zeros, inputs]
    return torch.cat(pieces)


BLOCK_T, BLOCK_C = 16, 256  # tokens and channels of a program that only convolves
DECODE_BLOCK_T = 4  # tokens at a time of one that also leaves the row's inputs
BLOCK_KEPT = 1024  # tokens whose state_block a program looks at at a time


@triton.jit
def _row_input(
    p_x, p_conv_state, o_input, o_channel, mask, start, block, offset, temporal_block,
    X_STRIDE: tl.constexpr, DIM: tl.constexpr, STATE_LEN: tl.constexpr, DIM_FIRST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Inputs of a row by number; those before its first, below 0, are in the window that it found, or zeros."""
    window_end = tl.where(temporal_block >= 0, 0, -WINDOW)
    o_slot = offset + WINDOW + o_input
    o_state = o_channel * STATE_LEN + o_slot if DIM_FIRST else o_slot * DIM + o_channel
    p_old = p_conv_state + block.to(tl.int64) * (DIM * STATE_LEN) + o_state
    b_old = tl.load(p_old, mask=mask & (o_input < window_end), other=0.0)
    p_new = p_x + (start + o_input).to(tl.int64) * X_STRIDE + o_channel
    return tl.where(o_input < 0, b_old, tl.load(p_new, mask=mask & (o_input >= 0), other=0.0))


@triton.jit
def _convolve(
    p_x, p_conv_state, p_weight, p_bias, p_y, first, o_channel, start, num_inputs, block, offset, temporal_block,
    X_STRIDE: tl.constexpr, DIM: tl.constexpr, STATE_LEN: tl.constexpr, DIM_FIRST: tl.constexpr, WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y of BLOCK_T inputs from number `first`. Each element alone, taps in order, fused: the same bits in any tile."""
    o_input = first + tl.arange(0, BLOCK_T)[:, None]
    mask = (o_input < num_inputs) & (o_channel < DIM)
    b_sums = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if HAS_BIAS:
        b_sums += tl.load(p_bias + o_channel, mask=o_channel < DIM, other=0.0)
    for tap in tl.static_range(WINDOW + 1):
        b_x = _row_input(
            p_x, p_conv_state, o_input - WINDOW + tap, o_channel, mask, start, block, offset, temporal_block,
            X_STRIDE, DIM, STATE_LEN, DIM_FIRST, WINDOW,
        )  # fmt: skip
        b_weight = tl.load(p_weight + tap * DIM + o_channel, mask=o_channel < DIM, other=0.0)
        b_sums = tl.fma(tl.broadcast_to(b_weight, [BLOCK_T, BLOCK_C]), b_x.to(tl.float32), b_sums)
    b_y = b_sums / (1.0 + tl.exp(-b_sums))
    p_token = p_y + (start + o_input).to(tl.int64) * DIM + o_channel
    tl.store(p_token, b_y.to(p_y.dtype.element_ty), mask=mask)


@triton.jit
def _leave_inputs(p_conv_state, block, b_inputs, o_slot, o_channel, mask, DIM, STATE_LEN, DIM_FIRST: tl.constexpr):
    o_state = o_channel * STATE_LEN + o_slot if DIM_FIRST else o_slot * DIM + o_channel
    tl.store(p_conv_state + block.to(tl.int64) * (DIM * STATE_LEN) + o_state, b_inputs, mask=mask)


@triton.jit
def causal_conv1d_kernel(
    p_x, p_conv_state, p_weight, p_bias, p_y,
    p_query_start, p_query_len, p_conv_block, p_conv_offset, p_temporal_block,
    X_STRIDE: tl.constexpr, DIM: tl.constexpr, STATE_LEN: tl.constexpr, DIM_FIRST: tl.constexpr, WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = silu(bias + sum_k weight[k] * input[. - (W-1) + k]) of every row, which may have any length.

    Grid (channel tiles, token tiles of the longest row, rows). A program owns y of BLOCK_T tokens x BLOCK_C channels;
    reads their inputs, and the row's old window where they reach into it; writes y. Sums in fp32. Leaves states alone:
    `leave_conv_inputs_kernel` follows when all windows have been read.
    """
    i_row, first = tl.program_id(2), tl.program_id(1) * BLOCK_T
    num_inputs = tl.load(p_query_len + i_row)
    if first < num_inputs:
        o_channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        start, block = tl.load(p_query_start + i_row), tl.load(p_conv_block + i_row)
        offset, temporal_block = tl.load(p_conv_offset + i_row), tl.load(p_temporal_block + i_row)
        _convolve(
            p_x, p_conv_state, p_weight, p_bias, p_y, first, o_channel, start, num_inputs, block, offset,
            temporal_block, X_STRIDE, DIM, STATE_LEN, DIM_FIRST, WINDOW, HAS_BIAS, BLOCK_T, BLOCK_C,
        )  # fmt: skip


@triton.jit
def causal_conv1d_decode_kernel(
    p_x, p_conv_state, p_weight, p_bias, p_y,
    p_query_start, p_query_len, p_conv_block, p_conv_offset, p_temporal_block,
    X_STRIDE: tl.constexpr, DIM: tl.constexpr, STATE_LEN: tl.constexpr, DIM_FIRST: tl.constexpr, WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """y, and the inputs that decode rows leave: slot s of conv_block = input s - (W-2), for s < W-2 + query_len.

    Grid (channel tiles, rows). A program owns all tokens and all slots of a row for BLOCK_C channels. Reads inputs and
    the old window; writes y and conv_block, in place: every thread has read before one writes. Sums in fp32.
    """
    i_row = tl.program_id(1)
    num_inputs = tl.load(p_query_len + i_row)
    if num_inputs > 0:
        o_channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        start, block = tl.load(p_query_start + i_row), tl.load(p_conv_block + i_row)
        offset, temporal_block = tl.load(p_conv_offset + i_row), tl.load(p_temporal_block + i_row)
        o_slot = tl.arange(0, BLOCK_S)[:, None]
        mask = (o_slot < WINDOW - 1 + num_inputs) & (o_channel < DIM)
        b_inputs = _row_input(
            p_x, p_conv_state, o_slot - (WINDOW - 1), o_channel, mask, start, block, offset, temporal_block,
            X_STRIDE, DIM, STATE_LEN, DIM_FIRST, WINDOW,
        )  # fmt: skip
        for first in range(0, num_inputs, BLOCK_T):
            _convolve(
                p_x, p_conv_state, p_weight, p_bias, p_y, first, o_channel, start, num_inputs, block, offset,
                temporal_block, X_STRIDE, DIM, STATE_LEN, DIM_FIRST, WINDOW, HAS_BIAS, BLOCK_T, BLOCK_C,
            )  # fmt: skip
        tl.debug_barrier()
        _leave_inputs(p_conv_state, block, b_inputs, o_slot, o_channel, mask, DIM, STATE_LEN, DIM_FIRST)


@triton.jit
def leave_conv_inputs_kernel(
    p_x, p_conv_state,
    p_query_start, p_query_len, p_conv_block, p_conv_offset, p_temporal_block, p_is_decode, p_state_block,
    X_STRIDE: tl.constexpr, DIM: tl.constexpr, STATE_LEN: tl.constexpr, DIM_FIRST: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_KEPT: tl.constexpr,
):  # fmt: skip
    """The inputs that rows leave: decode rows as above; prefill rows their last W-1, and W-1 at each kept token.

    Grid (channel tiles, rows). A program owns all slots that a row leaves, for BLOCK_C channels. Reads inputs, the old
    window and state_block; writes the blocks of kept tokens, then conv_block, in place: every thread has read before
    one writes. Values are moved, not computed with.
    """
    NONE: tl.constexpr = 2147483647
    i_row = tl.program_id(1)
    num_inputs = tl.load(p_query_len + i_row)
    if num_inputs > 0:
        o_channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        start, block = tl.load(p_query_start + i_row), tl.load(p_conv_block + i_row)
        offset, temporal_block = tl.load(p_conv_offset + i_row), tl.load(p_temporal_block + i_row)
        is_decode = tl.load(p_is_decode + i_row) != 0
        o_slot = tl.arange(0, BLOCK_S)[:, None]
        mask = (o_slot < WINDOW) & (o_channel < DIM)
        for first in range(0, tl.where(is_decode, 0, num_inputs), BLOCK_KEPT):
            o_token = first + tl.arange(0, BLOCK_KEPT)
            b_kept = tl.load(p_state_block + start + o_token, mask=o_token < num_inputs, other=-1)
            o_kept = tl.where((b_kept >= 0) & (b_kept != block), o_token, NONE)
            token = tl.min(o_kept, 0)
            while token != NONE:
                b_inputs = _row_input(
                    p_x, p_conv_state, token + 1 - WINDOW + o_slot, o_channel, mask, start, block, offset,
                    temporal_block, X_STRIDE, DIM, STATE_LEN, DIM_FIRST, WINDOW,
                )  # fmt: skip
                kept = tl.load(p_state_block + start + token)
                _leave_inputs(p_conv_state, kept, b_inputs, o_slot, o_channel, mask, DIM, STATE_LEN, DIM_FIRST)
                token = tl.min(tl.where(o_kept > token, o_kept, NONE), 0)

        oldest = tl.where(is_decode, 1 - WINDOW, num_inputs - WINDOW)
        mask = (o_slot < num_inputs - oldest) & (o_channel < DIM)
        b_inputs = _row_input(
            p_x, p_conv_state, oldest + o_slot, o_channel, mask, start, block, offset, temporal_block,
            X_STRIDE, DIM, STATE_LEN, DIM_FIRST, WINDOW,
        )  # fmt: skip
        tl.debug_barrier()
        _leave_inputs(p_conv_state, block, b_inputs, o_slot, o_channel, mask, DIM, STATE_LEN, DIM_FIRST)


def causal_conv1d_varlen_reference(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: MambaRows,
    layout: str,
) -> torch.Tensor:
    """Convolve x and apply silu; leave every row's inputs in `conv_state`, in place.

    x [T, dim], whose tokens may lie further apart than dim; conv_state [blocks, state_len, dim] ("SD") or
    [blocks, dim, state_len] ("DS"), in the dtype of x; weight [W, dim] and bias [dim] in fp32. Returns [T, dim] in the
    dtype of x; undefined for tokens of no row. Number the inputs of a row from 0, its window being -(W-1) .. -1: slots
    conv_offset .. conv_offset+W-2 of conv_block, or zeros without a temporal_block. A decode row leaves inputs
    -(W-2) .. q-1 in conv_block, from slot 0; a prefill row the last W-1, and in the state_block of a token the W-1 that
    end with it.
    """
    window = weight.shape[0] - 1
    slots = conv_state if layout == "SD" else conv_state.transpose(1, 2)
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    kept_blocks = rows.state_block.tolist()
    for row, (start, num_inputs) in enumerate(zip(rows.query_start.tolist(), rows.query_len.tolist(), strict=True)):
        if num_inputs == 0:
            continue
        block, offset = int(rows.conv_block[row]), int(rows.conv_offset[row])
        has_window = int(rows.temporal_block[row]) >= 0
        old = slots[block, offset : offset + window] if has_window else x.new_zeros(window, x.shape[1])
        inputs = torch.cat([old, x[start : start + num_inputs]])  # input i is inputs[window + i]
        sums = torch.zeros(num_inputs, x.shape[1], device=x.device) if bias is None else bias
        for tap in range(window + 1):
            sums = sums + weight[tap] * inputs[tap : tap + num_inputs].float()
        y[start : start + num_inputs] = silu(sums)
        if int(rows.is_decode[row]):
            slots[block, : window - 1 + num_inputs] = inputs[1:]
            continue
        for i, kept in enumerate(kept_blocks[start : start + num_inputs]):
            if kept >= 0 and kept != block:
                slots[kept, :window] = inputs[i + 1 : i + 1 + window]
        slots[block, :window] = inputs[num_inputs:]
    return y


def causal_conv1d_varlen_triton(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: MambaRows,
    layout: str,
) -> torch.Tensor:
    """`causal_conv1d_varlen_reference` in one launch when all rows are decode rows, else in two."""
    (num_tokens, dim), num_rows = x.shape, len(rows.query_start)
    y = torch.empty(num_tokens, dim, dtype=x.dtype, device=x.device)
    if rows.max_query_len == 0 or num_rows == 0:
        return y
    dim_first = layout == "DS"
    state_len = conv_state.shape[2 if dim_first else 1]
    where = (rows.query_start, rows.query_len, rows.conv_block, rows.conv_offset, rows.temporal_block)
    sizes = (x.stride(0), dim, state_len, dim_first, weight.shape[0] - 1)
    tensors = (x, conv_state, weight, weight if bias is None else bias, y)
    block_s, channel_tiles = triton.next_power_of_2(state_len), triton.cdiv(dim, BLOCK_C)
    if rows.all_decode:
        causal_conv1d_decode_kernel[channel_tiles, num_rows](
            *tensors, *where, *sizes, bias is not None, DECODE_BLOCK_T, BLOCK_C, block_s
        )
        return y
    grid = (channel_tiles, triton.cdiv(rows.max_query_len, BLOCK_T), num_rows)
    causal_conv1d_kernel[grid](*tensors, *where, *sizes, bias is not None, BLOCK_T, BLOCK_C)
    leave_conv_inputs_kernel[channel_tiles, num_rows](
        x, conv_state, *where, rows.is_decode, rows.state_block, *sizes, BLOCK_C, block_s, BLOCK_KEPT
    )
    return y


def causal_conv1d_varlen(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: MambaRows,
    layout: str,
) -> torch.Tensor:
    """`causal_conv1d_varlen_reference`, fast: no host value but those of `rows` is looked at."""
    assert conv_state.is_contiguous() and x.stride(1) == 1 and conv_state.dtype == x.dtype
    if x.is_cuda:
        return causal_conv1d_varlen_triton(x, conv_state, weight, bias, rows, layout)
    if x.dtype == torch.float32:
        from mambalign.kernels.cpu import conv_scan  # compiles: not where a GPU serves

        return conv_scan.causal_conv1d(x, conv_state, weight, bias, rows, layout)
    return causal_conv1d_varlen_reference(x, conv_state, weight, bias, rows, layout)
