"""The Mamba-2 scan on a CPU: one call a layer, straight from and to the paged fp32 states.

As `kernels/cpu/conv.py` does the conv: compiled when this module is imported, one piece of code for all tokens of all
rows. A head's state stays in a buffer of the processor's cache over the row's tokens and is copied to a block where one
is asked for. Formula and contract: `kernels/mamba2_scan.py`, `kernels/rows.py`.
"""

import math

import numpy as np
import torch
from numba import njit

from mambalign.kernels.cpu.paged_rows import (
    LINEAR_ABOVE,
    address_of,
    copy_values,
    deferral_addresses,
    floats_at,
    ints,
    ints_at,
    leave_inputs,
    leave_state,
    read_inputs,
    read_state,
    row_addresses,
    share,
)
from mambalign.kernels.cpu.vector_rows import LANES, ROWS, scan_four_rows
from mambalign.kernels.rows import MambaRows


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
