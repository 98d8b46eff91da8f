"""Causal depthwise convolution over a paged conv state.

Formula: y_i = f(bias + sum_k weight[k] * input[i - (W-1) + k]), one channel at a time, taps added in order in fp32.
f is silu, or nothing.

Number a row's inputs from 0; those before, -(W-1) .. -1, are its window. A row's conv state holds the window of its
next token. Decode rows keep more: the state block of their running column also has the inputs of the drafts, and their
window starts at slot `num_accepted - 1`, so that rejected drafts are simply not looked at. After a step of q tokens

    a decode row has left inputs -(W-2) .. q-1 in slots 0 .. W-3+q of its block,
    a prefill row inputs q-(W-1) .. q-1 in slots 0 .. W-2, and the W-1 that end with a kept token in that token's block.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.activation import silu
from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.rows import ROW_POINTERS, MambaRows

BLOCK_T, BLOCK_C = 16, 512  # tokens and channels of a program that only convolves
BLOCK_KEPT = 1024  # tokens whose state_block a program looks at at a time
MAX_WIDTH = 4  # of a conv whose window lies in registers: the widest of the published families


@triton.jit
def _row_input(
    p_row, p_window, i_input, o_channel, window_dim,
    X_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Input i_input of a row; those before its first, -WINDOW .. -1, are in the window that it found; else zeros."""
    dim_old = tl.where(i_input < 0, tl.where(i_input >= -WINDOW, window_dim, 0), 0)
    b_old = tl.load(p_window + i_input * SLOT_STRIDE, mask=o_channel < dim_old, other=0.0)
    dim_new = tl.where(i_input < 0, 0, DIM)
    b_new = tl.load(p_row + i_input.to(tl.int64) * X_STRIDE, mask=o_channel < dim_new, other=0.0)
    return tl.where(i_input < 0, b_old, b_new)


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def causal_conv1d_kernel(
    p_x, p_conv_state, p_weight, p_bias, p_y,
    p_query_start, p_query_len, p_conv_block, p_conv_offset, p_temporal_block,
    X_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, CHANNEL_STRIDE: tl.constexpr,
    DIM: tl.constexpr, WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr,
    LEAVES_INPUTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y_i = f(bias + sum_k weight[k] * input[i - (W-1) + k]) of all rows, channel by channel, oldest tap first.

    Grid (channel tiles, rows, token tiles of the longest row). A program owns BLOCK_T tokens of a row and keeps the
    three inputs before a token in registers. Reads inputs, and the row's old window where they reach into it; writes y.
    Sums in fp32, fused. LEAVES_INPUTS, when all are decode rows: a program owns all tokens of its row, and slot s of
    conv_block becomes input s - (W-2), in place, after the window has been read.
    """
    wait_for_inputs(PDL)
    i_row, first = tl.program_id(1), tl.program_id(2) * BLOCK_T
    num_inputs = tl.load(p_query_len + i_row)
    if first < num_inputs:
        o_channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        mask = o_channel < DIM
        start = tl.load(p_query_start + i_row).to(tl.int64)
        p_row, p_out = p_x + start * X_STRIDE + o_channel, p_y + (start + first) * DIM + o_channel
        p_block = p_conv_state + tl.load(p_conv_block + i_row).to(tl.int64) * BLOCK_STRIDE + o_channel * CHANNEL_STRIDE
        p_window = p_block + (tl.load(p_conv_offset + i_row) + WINDOW) * SLOT_STRIDE
        window_dim = tl.where(tl.load(p_temporal_block + i_row) >= 0, DIM, 0)
        b_x3 = _row_input(p_row, p_window, first - 3, o_channel, window_dim, X_STRIDE, SLOT_STRIDE, DIM, WINDOW)
        b_x2 = _row_input(p_row, p_window, first - 2, o_channel, window_dim, X_STRIDE, SLOT_STRIDE, DIM, WINDOW)
        b_x1 = _row_input(p_row, p_window, first - 1, o_channel, window_dim, X_STRIDE, SLOT_STRIDE, DIM, WINDOW)
        b_next = tl.load(p_row + first.to(tl.int64) * X_STRIDE, mask=mask, other=0.0)
        # a tap that the conv is too narrow for has weight 0 and input 0
        b_w3 = tl.load(p_weight + (WINDOW - 3) * DIM + o_channel, mask=mask & (WINDOW >= 3), other=0.0)
        b_w2 = tl.load(p_weight + (WINDOW - 2) * DIM + o_channel, mask=mask & (WINDOW >= 2), other=0.0)
        b_w1 = tl.load(p_weight + (WINDOW - 1) * DIM + o_channel, mask=mask & (WINDOW >= 1), other=0.0)
        b_w0 = tl.load(p_weight + WINDOW * DIM + o_channel, mask=mask, other=0.0)
        b_bias = tl.load(p_bias + o_channel, mask=mask & HAS_BIAS, other=0.0)
        stop = tl.minimum(first + BLOCK_T, num_inputs)
        if LEAVES_INPUTS:
            stop = num_inputs
            tl.debug_barrier()  # every thread has read before one writes
            if WINDOW == 3:
                tl.store(p_block, b_x2, mask=mask)
            if WINDOW >= 2:
                tl.store(p_block + (WINDOW - 2) * SLOT_STRIDE, b_x1, mask=mask)
        for i_input in range(first, stop):
            b_x0 = b_next
            b_next = tl.load(p_row + tl.minimum(i_input + 1, stop - 1).to(tl.int64) * X_STRIDE, mask=mask, other=0.0)
            b_sums = tl.fma(b_w3, b_x3.to(tl.float32), b_bias)
            b_sums = tl.fma(b_w2, b_x2.to(tl.float32), b_sums)
            b_sums = tl.fma(b_w1, b_x1.to(tl.float32), b_sums)
            b_sums = tl.fma(b_w0, b_x0.to(tl.float32), b_sums)
            b_y = b_sums / (1.0 + tl.exp(-b_sums)) if HAS_SILU else b_sums
            tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask=mask)
            p_out += DIM
            if LEAVES_INPUTS:
                tl.store(p_block + (WINDOW - 1 + i_input) * SLOT_STRIDE, b_x0, mask=mask)
            b_x3, b_x2, b_x1 = b_x2, b_x1, b_x0


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def leave_conv_inputs_kernel(
    p_x, p_conv_state,
    p_query_start, p_query_len, p_conv_block, p_conv_offset, p_temporal_block, p_is_decode, p_state_block,
    X_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, CHANNEL_STRIDE: tl.constexpr,
    DIM: tl.constexpr, WINDOW: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The inputs that rows leave: decode rows as above; prefill rows their last W-1, and W-1 at each kept token.

    Grid (channel tiles, rows). A program owns all slots that a row leaves, for BLOCK_C channels. Reads inputs, the old
    window and state_block; writes the blocks of kept tokens, then conv_block, in place, slot by slot upwards: a slot is
    written after what it holds was read. Values are moved, not computed with.
    """
    wait_for_inputs(PDL)
    NONE: tl.constexpr = 2147483647
    i_row = tl.program_id(1)
    num_inputs = tl.load(p_query_len + i_row)
    if num_inputs > 0:
        o_channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        mask = o_channel < DIM
        start, block = tl.load(p_query_start + i_row).to(tl.int64), tl.load(p_conv_block + i_row)
        p_row, p_channels = p_x + start * X_STRIDE + o_channel, p_conv_state + o_channel * CHANNEL_STRIDE
        p_block = p_channels + block.to(tl.int64) * BLOCK_STRIDE
        p_window = p_block + (tl.load(p_conv_offset + i_row) + WINDOW) * SLOT_STRIDE
        window_dim = tl.where(tl.load(p_temporal_block + i_row) >= 0, DIM, 0)
        is_decode = tl.load(p_is_decode + i_row) != 0
        for first in range(0, tl.where(is_decode, 0, num_inputs), BLOCK_KEPT):
            o_token = first + tl.arange(0, BLOCK_KEPT)
            b_kept = tl.load(p_state_block + start + o_token, mask=o_token < num_inputs, other=-1)
            o_kept = tl.where((b_kept >= 0) & (b_kept != block), o_token, NONE)
            i_token = tl.min(o_kept, 0)
            while i_token != NONE:
                p_kept = p_channels + tl.load(p_state_block + start + i_token).to(tl.int64) * BLOCK_STRIDE
                for slot in range(WINDOW):
                    b_input = _row_input(
                        p_row, p_window, i_token + 1 - WINDOW + slot, o_channel, window_dim,
                        X_STRIDE, SLOT_STRIDE, DIM, WINDOW,
                    )  # fmt: skip
                    tl.store(p_kept + slot * SLOT_STRIDE, b_input, mask=mask)
                i_token = tl.min(tl.where(o_kept > i_token, o_kept, NONE), 0)
        oldest = tl.where(is_decode, 1 - WINDOW, num_inputs - WINDOW)
        for slot in range(0, num_inputs - oldest):
            b_input = _row_input(
                p_row, p_window, oldest + slot, o_channel, window_dim, X_STRIDE, SLOT_STRIDE, DIM, WINDOW
            )
            tl.debug_barrier()  # every thread has read before one writes
            tl.store(p_block + slot * SLOT_STRIDE, b_input, mask=mask)


def causal_conv1d_varlen_reference(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: MambaRows,
    layout: str,
    has_silu: bool = True,
) -> torch.Tensor:
    """Convolve x, apply silu if `has_silu`, and leave every row's inputs in `conv_state`, in place.

    x [T, dim], whose tokens may lie further apart than dim; conv_state [blocks, state_len, dim] ("SD") or
    [blocks, dim, state_len] ("DS"), in the dtype of x; weight [W, dim] and bias [dim] in fp32. Returns [T, dim] in the
    dtype of x; undefined for tokens of no row. A row's window is in slots conv_offset .. conv_offset+W-2 of conv_block,
    or zeros without a temporal_block; what it leaves is said above. A kept token is one with a state_block, other than
    conv_block, in a prefill row.
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
        sums = torch.zeros(x.shape[1], dtype=torch.float32, device=x.device) if bias is None else bias
        for tap in range(window + 1):
            sums = sums + weight[tap] * inputs[tap : tap + num_inputs].float()
        y[start : start + num_inputs] = silu(sums) if has_silu else sums
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
    has_silu: bool = True,
) -> torch.Tensor:
    """`causal_conv1d_varlen_reference` in one launch when all rows are decode rows, else in two."""
    (num_tokens, dim), num_rows, width = x.shape, len(rows.query_start), weight.shape[0]
    assert width <= MAX_WIDTH, f"a conv of width {width}"
    y = torch.empty(num_tokens, dim, dtype=x.dtype, device=x.device)
    if num_tokens == 0 or num_rows == 0:
        return y
    strides = conv_state.stride() if layout == "SD" else (conv_state.stride(0), 1, conv_state.stride(1))
    sizes = (x.stride(0), *strides, dim, width - 1)
    where = (rows.query_start, rows.query_len, rows.conv_block, rows.conv_offset, rows.temporal_block)
    channel_tiles, token_tiles = triton.cdiv(dim, BLOCK_C), triton.cdiv(max(rows.max_query_len, 1), BLOCK_T)
    causal_conv1d_kernel[channel_tiles, num_rows, 1 if rows.all_decode else token_tiles](
        x, conv_state, weight, weight if bias is None else bias, y, *where,
        *sizes, bias is not None, has_silu, rows.all_decode, BLOCK_T, BLOCK_C, **pdl(x.device),
    )  # fmt: skip
    if not rows.all_decode:
        leave_conv_inputs_kernel[channel_tiles, num_rows](
            x, conv_state, *where, rows.is_decode, rows.state_block, *sizes, BLOCK_C, BLOCK_KEPT, **pdl(x.device)
        )
    return y


def causal_conv1d_varlen(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: MambaRows,
    layout: str,
    has_silu: bool = True,
) -> torch.Tensor:
    """`causal_conv1d_varlen_reference`, fast: no host value but those of `rows` is looked at."""
    assert conv_state.is_contiguous() and x.stride(1) == 1 and conv_state.dtype == x.dtype
    assert weight.is_contiguous() and weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32)
    if x.is_cuda:
        return causal_conv1d_varlen_triton(x, conv_state, weight, bias, rows, layout, has_silu)
    from mambalign.kernels.cpu import conv  # compiles: not where a GPU serves

    return conv.causal_conv1d(x, conv_state, weight, bias, rows, layout, has_silu)
