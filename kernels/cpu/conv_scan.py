"""The causal conv and the Mamba-2 scan on a CPU: one call a layer, straight from and to the paged fp32 states.

Compiled when this module is imported; the machine code is kept for the next process. A row's bits come from that row
alone: one piece of code takes every token of every row, whatever the batch and however a text is cut. A head's state
stays in a buffer of the processor's cache over the row's tokens and is copied to a block where one is asked for.
Formulas and contracts: `kernels/causal_conv1d.py`, `kernels/mamba2_scan.py`, `kernels/rows.py`.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from numba import carray, njit

from mambalign.kernels.activation import SOFTPLUS_LINEAR_ABOVE
from mambalign.kernels.cpu.vector_rows import LANES, ROWS, as_pointer, scan_four_rows
from mambalign.kernels.rows import MambaRows

SHARED_ABOVE = 1 << 21  # state elements to update (one takes 0.1 ns) from which threads share a call
CHANNEL_COST = 64  # a channel of the conv takes as long as this many state elements

LINEAR_ABOVE = np.float32(SOFTPLUS_LINEAR_ABOVE)


def ints(count: int) -> str:
    """Of a compiled signature. Tensors come as addresses: 0.1 us each, a numpy view of a view takes 4."""
    return ", ".join(["int64"] * count)


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


def mamba2_scan(
    x: torch.Tensor,
    dt_raw: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_min: float,
    temporal_state: torch.Tensor,
    rows: MambaRows,
) -> torch.Tensor:
    """As `mamba2_scan_varlen`, for a `temporal_state` in fp32."""
    x, dt_raw, B, C = x.float(), dt_raw.float(), B.float(), C.float()
    num_tokens, num_heads, head_dim = x.shape
    num_groups, d_state = B.shape[1:]
    y = torch.empty(num_tokens, num_heads, head_dim, dtype=torch.float32)
    arguments = (address_of(x), x.stride(0), address_of(dt_raw), dt_raw.stride(0))
    arguments += (address_of(B), B.stride(0), address_of(C), C.stride(0))
    arguments += (A.data_ptr(), D.data_ptr(), dt_bias.data_ptr(), dt_min)
    arguments += (temporal_state.data_ptr(), len(temporal_state), y.data_ptr(), num_tokens)
    arguments += (num_heads, head_dim, num_groups, d_state, *row_addresses(rows), *deferral_addresses(rows))
    share(lambda first, last: _scan(*arguments, first, last), num_heads, y.numel() * d_state)
    return y


def address_of(tensor: torch.Tensor) -> int:
    """Of the first element of a view whose tokens may lie further apart than they are wide; each is dense."""
    shape, strides = tensor.shape, tensor.stride()
    dense = strides[-1] == 1 and (len(shape) != 3 or shape[1] == 1 or strides[1] == shape[2])
    assert dense, f"strides {strides} of shape {shape}"
    return tensor.data_ptr()


def row_addresses(rows: MambaRows) -> tuple[int, ...]:
    fields = (rows.query_start, rows.query_len, rows.conv_block, rows.conv_offset)
    fields += (rows.temporal_block, rows.is_decode, rows.state_block)
    return (*(field.data_ptr() for field in fields), len(rows.query_start))


def deferral_addresses(rows: MambaRows) -> tuple[int, ...]:
    deferral = rows.deferral
    fields = (deferral.is_deferring, deferral.num_replays, deferral.replay_block)
    return (*(field.data_ptr() for field in fields), deferral.replay_block.shape[1])


def share(run: Callable[[int, int], None], width: int, work: int, unit: int = 1) -> None:
    """run(first, last) over 0 .. width, by several threads when it is worth their start."""
    threads = torch.get_num_threads() if work > SHARED_ABOVE else 1
    step = -(-width // (threads * unit)) * unit
    parts = [(first, min(first + step, width)) for first in range(0, width, step)]
    others = [_threads().submit(run, *part) for part in parts[1:]]
    run(*parts[0])
    for other in others:
        other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "conv_scan")


@njit
def floats_at(address, shape):
    return carray(as_pointer(address), shape, np.float32)


@njit
def ints_at(address, shape):
    return carray(as_pointer(address), shape, np.int32)


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
def copy_values(out, values):
    for i in range(out.shape[0]):
        out[i] = values[i]


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


@njit
def read_state(state, memory, place, head_dim, d_state):
    """state [rows, lanes], larger than [head_dim, d_state] when that is odd, = what lies at `place`."""
    if state.shape[1] == d_state:
        copy_values(state.reshape(-1)[: head_dim * d_state], memory[place : place + head_dim * d_state])
    else:
        for p in range(head_dim):
            copy_values(state[p, :d_state], memory[place + p * d_state : place + (p + 1) * d_state])


@njit
def leave_state(state, memory, place, head_dim, d_state):
    if state.shape[1] == d_state:
        copy_values(memory[place : place + head_dim * d_state], state.reshape(-1)[: head_dim * d_state])
    else:
        for p in range(head_dim):
            copy_values(memory[place + p * d_state : place + (p + 1) * d_state], state[p, :d_state])


@njit
def leave_inputs(memory, place, vector, rows, first, second):
    """What the state takes of a token, at the beginning of a head's state: a vector, a value a row, two numbers."""
    num_columns, end = vector.shape[0], place + vector.shape[0] + rows.shape[0]
    copy_values(memory[place : place + num_columns], vector)
    copy_values(memory[place + num_columns : end], rows)
    memory[end], memory[end + 1] = first, second


@njit
def read_inputs(memory, place, vector, rows):
    """As `leave_inputs` left them; returns the two numbers."""
    num_columns, end = vector.shape[0], place + vector.shape[0] + rows.shape[0]
    copy_values(vector, memory[place : place + num_columns])
    copy_values(rows, memory[place + num_columns : end])
    return memory[end], memory[end + 1]


@njit(f"void({ints(11)}, float32, {ints(22)})", cache=True, nogil=True)
def _scan(
    x, x_stride, dt_raw, dt_stride, B, B_stride, C, C_stride, A, D, dt_bias, dt_min, temporal_state, num_blocks, y,
    num_tokens, num_heads, head_dim, num_groups, d_state,
    query_start, query_len, conv_block, conv_offset, temporal_block, is_decode, state_block, num_rows,
    is_deferring, num_replays, replay_block, num_spec_tokens, first_head, last_head,
):  # fmt: skip
    """Heads first .. last of all rows. Buffers are whole vectors wide; what is past the end of one stays zero."""
    x, dt_raw = floats_at(x, num_tokens * x_stride), floats_at(dt_raw, num_tokens * dt_stride)
    B, C = floats_at(B, num_tokens * B_stride), floats_at(C, num_tokens * C_stride)
    A, D, dt_bias = floats_at(A, num_heads), floats_at(D, num_heads), floats_at(dt_bias, num_heads)
    size = head_dim * d_state
    temporal_state = floats_at(temporal_state, num_blocks * num_heads * size)
    y = floats_at(y, (num_tokens, num_heads, head_dim))
    query_start, query_len = ints_at(query_start, num_rows), ints_at(query_len, num_rows)
    temporal_block, state_block = ints_at(temporal_block, num_rows), ints_at(state_block, num_tokens)
    is_deferring, num_replays = ints_at(is_deferring, num_rows), ints_at(num_replays, num_rows)
    replay_block = ints_at(replay_block, (num_rows, num_spec_tokens))
    num_chunks, num_quads = -(-d_state // LANES), -(-head_dim // ROWS)
    state = np.zeros((num_quads * ROWS, num_chunks * LANES), np.float32)
    flat_state = state.reshape(-1)
    b_B, b_C = np.zeros(num_chunks * LANES, np.float32), np.zeros(num_chunks * LANES, np.float32)
    b_x, b_y = np.zeros(num_quads * ROWS, np.float32), np.zeros(num_quads * ROWS, np.float32)
    for row in range(num_rows):
        start, stop = np.int64(query_start[row]), np.int64(query_start[row]) + np.int64(query_len[row])
        if start == stop:
            continue
        for head in range(first_head, last_head):
            group = head // (num_heads // num_groups)
            state[:] = np.float32(0.0)
            if temporal_block[row] >= 0:
                place = (np.int64(temporal_block[row]) * num_heads + head) * size
                read_state(state, temporal_state, place, head_dim, d_state)
            for i in range(num_replays[row]):
                place = (np.int64(replay_block[row, i]) * num_heads + head) * size
                dt, decay = read_inputs(temporal_state, place, b_B[:d_state], b_x[:head_dim])
                for quad in range(num_quads):  # outputs that nobody looks at
                    scan_four_rows(flat_state, b_B, b_C, b_x, b_y, quad * ROWS, num_chunks, decay, dt, D[head])
            for token in range(start, stop):
                dt = dt_raw[token * dt_stride + head] + dt_bias[head]
                if dt <= LINEAR_ABOVE:
                    dt = math.log1p(math.exp(dt))
                dt = max(dt, dt_min)
                decay = math.exp(dt * A[head])
                at = token * B_stride + group * d_state
                copy_values(b_B[:d_state], B[at : at + d_state])
                at = token * C_stride + group * d_state
                copy_values(b_C[:d_state], C[at : at + d_state])
                at = token * x_stride + head * head_dim
                copy_values(b_x[:head_dim], x[at : at + head_dim])
                for quad in range(num_quads):
                    scan_four_rows(flat_state, b_B, b_C, b_x, b_y, quad * ROWS, num_chunks, decay, dt, D[head])
                copy_values(y[token, head], b_y[:head_dim])
                if state_block[token] >= 0:
                    place = (np.int64(state_block[token]) * num_heads + head) * size
                    if is_deferring[row] != 0 and token > start:
                        leave_inputs(temporal_state, place, b_B[:d_state], b_x[:head_dim], dt, decay)
                    else:
                        leave_state(state, temporal_state, place, head_dim, d_state)
