"""The causal conv on a CPU: one call a layer, straight from and to the paged states.

Compiled when this module is imported; the machine code is kept for the next process. A row's bits come from that row
alone: one piece of code takes every token of every row, whatever the batch and however a text is cut. Formula and
contract: `kernels/causal_conv1d.py`, `kernels/rows.py`.
"""

from dataclasses import replace

import numpy as np
import torch
from numba import njit

from mambalign.kernels.cpu.paged_rows import address_of, copy_values, floats_at, ints, ints_at, row_addresses, share
from mambalign.kernels.cpu.vector_rows import LANES
from mambalign.kernels.rows import MambaRows

CHANNEL_COST = 64  # a channel of the conv takes as long as this many state elements


def causal_conv1d(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: MambaRows,
    layout: str,
    has_silu: bool = True,
) -> torch.Tensor:
    """As `causal_conv1d_varlen`. States of 16 bits are worked on in a copy of the rows' blocks."""
    if x.dtype != torch.float32:
        return _causal_conv1d_16_bit(x, conv_state, weight, bias, rows, layout, has_silu)
    num_tokens, dim = x.shape
    bias = torch.zeros(dim, dtype=torch.float32) if bias is None else bias
    y, slots_first = torch.empty(num_tokens, dim, dtype=torch.float32), layout == "SD"
    arguments = (address_of(x), x.stride(0), conv_state.data_ptr(), *conv_state.shape, slots_first, has_silu)
    arguments += (weight.data_ptr(), weight.shape[0], bias.data_ptr(), y.data_ptr(), num_tokens, *row_addresses(rows))
    share(lambda first, last: _conv(*arguments, first, last), dim, num_tokens * dim * CHANNEL_COST, LANES)
    return y


def _causal_conv1d_16_bit(x, conv_state, weight, bias, rows: MambaRows, layout: str, has_silu: bool) -> torch.Tensor:
    """The blocks that rows name, widened, with the rows pointed at them; values are exact both ways."""
    named = torch.cat([rows.conv_block, rows.state_block]).clamp_(min=0)
    blocks, places = torch.unique(named, return_inverse=True)
    conv_block, state_block = places.int().split([len(rows.conv_block), len(rows.state_block)])
    rows = replace(rows, conv_block=conv_block, state_block=state_block.where(rows.state_block >= 0, -1))
    states = conv_state[blocks].float()
    y = causal_conv1d(x.float(), states, weight, bias, rows, layout, has_silu)
    conv_state[blocks] = states.to(conv_state.dtype)
    return y.to(x.dtype)


@njit
def _exp(x):
    """exp(x) in fp32 within 1 ulp, in operations that vectorise (Cephes' expf); least value 1.2e-38."""
    x = min(max(x, np.float32(-87.33654)), np.float32(88.37626))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit("void(float32[::1], float32[::1])", cache=True, nogil=True, error_model="numpy")
def _silu(x, out):
    for i in range(x.shape[0]):
        out[i] = x[i] / (np.float32(1.0) + _exp(-x[i]))


@njit
def _multiply_add(sums, weight, values):
    for i in range(sums.shape[0]):
        sums[i] += weight[i] * values[i]


@njit
def _input(old, inputs, stride, i):
    """Input i of a row; those before its first, i < 0, are in the window that it found."""
    return old[i + old.shape[0]] if i < 0 else inputs[i * stride : i * stride + old.shape[1]]


@njit
def _leave(conv_state, slots_first, block, first, old, inputs, stride, oldest, count):
    """Slots 0 .. count-1 of `block` = the row's inputs from number `oldest`."""
    last = first + old.shape[1]
    for slot in range(count):
        values = _input(old, inputs, stride, oldest + slot)
        if slots_first:
            copy_values(conv_state[block, slot, first:last], values)
        else:
            copy_values(conv_state[block, first:last, slot], values)


@njit(f"void({ints(6)}, boolean, boolean, {ints(15)})", cache=True, nogil=True)
def _conv(
    x, stride, conv_state, num_blocks, length, width, slots_first, has_silu, weight, conv_width, bias, y, num_tokens,
    query_start, query_len, conv_block, conv_offset, temporal_block, is_decode, state_block, num_rows, first, last,
):  # fmt: skip
    """Channels first .. last of all rows. A row's window is read before anything of the row is written."""
    dim = width if slots_first else length
    x, bias = floats_at(x, num_tokens * stride), floats_at(bias, dim)
    conv_state = floats_at(conv_state, (num_blocks, length, width))
    weight, y = floats_at(weight, (conv_width, dim)), floats_at(y, (num_tokens, dim))
    query_start, query_len = ints_at(query_start, num_rows), ints_at(query_len, num_rows)
    conv_block, conv_offset = ints_at(conv_block, num_rows), ints_at(conv_offset, num_rows)
    temporal_block, is_decode = ints_at(temporal_block, num_rows), ints_at(is_decode, num_rows)
    state_block = ints_at(state_block, num_tokens)
    window = conv_width - 1
    old, sums = np.empty((window, last - first), np.float32), np.empty(last - first, np.float32)
    for row in range(num_rows):
        start, num_inputs, block = np.int64(query_start[row]), np.int64(query_len[row]), np.int64(conv_block[row])
        if num_inputs == 0:
            continue
        inputs = x[start * stride + first :]
        for i in range(window):
            slot = np.int64(conv_offset[row]) + i
            if temporal_block[row] < 0:
                old[i] = np.float32(0.0)
            elif slots_first:
                copy_values(old[i], conv_state[block, slot, first:last])
            else:
                copy_values(old[i], conv_state[block, first:last, slot])

        for i in range(num_inputs):
            copy_values(sums, bias[first:last])
            for tap in range(conv_width):
                _multiply_add(sums, weight[tap, first:last], _input(old, inputs, stride, i - window + tap))
            if has_silu:
                _silu(sums, y[start + i, first:last])
            else:
                copy_values(y[start + i, first:last], sums)
            kept = np.int64(state_block[start + i])
            if is_decode[row] == 0 and kept >= 0 and kept != block:
                _leave(conv_state, slots_first, kept, first, old, inputs, stride, i + 1 - window, window)
        if is_decode[row] == 0:
            _leave(conv_state, slots_first, block, first, old, inputs, stride, num_inputs - window, window)
        else:
            _leave(conv_state, slots_first, block, first, old, inputs, stride, 1 - window, window - 1 + num_inputs)
