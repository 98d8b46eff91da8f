"""The gated delta rule on a CPU: one call a layer, straight from and to the paged fp32 states.

As `kernels/cpu/scan.py` does the Mamba-2 scan: compiled when this module is imported, one piece of code for every
token of every row, a head's state in a buffer of the processor's cache over the row's tokens. Formula and contract:
`kernels/gated_delta_rule.py`.
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
from mambalign.kernels.cpu.vector_rows import LANES, ROWS, delta_four_rows, dot
from mambalign.kernels.rows import MambaRows

NORM_EPS = np.float32(1e-6)  # of the keys and queries


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a_raw: torch.Tensor,
    b_raw: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    temporal_state: torch.Tensor,
    rows: MambaRows,
) -> torch.Tensor:
    """As `gated_delta_rule_varlen`, for a `temporal_state` in fp32."""
    inputs = [t.float() for t in (q, k, v, a_raw, b_raw)]
    num_tokens, num_heads, v_dim = v.shape
    key_heads, k_dim = k.shape[1:]
    o = torch.empty(num_tokens, num_heads, v_dim, dtype=torch.float32)
    arguments = [number for t in inputs for number in (address_of(t), t.stride(0))]
    arguments += [A.data_ptr(), dt_bias.data_ptr(), temporal_state.data_ptr(), len(temporal_state), o.data_ptr()]
    arguments += [num_tokens, num_heads, v_dim, key_heads, k_dim, *row_addresses(rows), *deferral_addresses(rows)]
    share(lambda first, last: _scan(*arguments, first, last), num_heads, 2 * o.numel() * k_dim)
    return o


@njit
def _copy_scaled(out, values, scale):
    for i in range(out.shape[0]):
        out[i] = values[i] * scale


@njit(f"void({ints(34)})", cache=True, nogil=True)
def _scan(
    q, q_stride, k, k_stride, v, v_stride, a_raw, a_stride, b_raw, b_stride, A, dt_bias, temporal_state, num_blocks, o,
    num_tokens, num_heads, v_dim, key_heads, k_dim,
    query_start, query_len, conv_block, conv_offset, temporal_block, is_decode, state_block, num_rows,
    is_deferring, num_replays, replay_block, num_spec_tokens, first_head, last_head,
):  # fmt: skip
    """Heads first .. last of all rows. Buffers are whole vectors wide; what is past the end of one stays zero."""
    q, k = floats_at(q, num_tokens * q_stride), floats_at(k, num_tokens * k_stride)
    v, a_raw = floats_at(v, num_tokens * v_stride), floats_at(a_raw, num_tokens * a_stride)
    b_raw, A, dt_bias = floats_at(b_raw, num_tokens * b_stride), floats_at(A, num_heads), floats_at(dt_bias, num_heads)
    size = v_dim * k_dim
    temporal_state = floats_at(temporal_state, num_blocks * num_heads * size)
    o = floats_at(o, (num_tokens, num_heads, v_dim))
    query_start, query_len = ints_at(query_start, num_rows), ints_at(query_len, num_rows)
    temporal_block, state_block = ints_at(temporal_block, num_rows), ints_at(state_block, num_tokens)
    is_deferring, num_replays = ints_at(is_deferring, num_rows), ints_at(num_replays, num_rows)
    replay_block = ints_at(replay_block, (num_rows, num_spec_tokens))
    num_chunks, num_quads = -(-k_dim // LANES), -(-v_dim // ROWS)
    state = np.zeros((num_quads * ROWS, num_chunks * LANES), np.float32)
    flat_state = state.reshape(-1)
    b_k, b_q = np.zeros(num_chunks * LANES, np.float32), np.zeros(num_chunks * LANES, np.float32)
    b_v, b_o = np.zeros(num_quads * ROWS, np.float32), np.zeros(num_quads * ROWS, np.float32)
    one, query_scale = np.float32(1.0), np.float32(1.0 / math.sqrt(k_dim))
    for row in range(num_rows):
        start, stop = np.int64(query_start[row]), np.int64(query_start[row]) + np.int64(query_len[row])
        if start == stop:
            continue
        for head in range(first_head, last_head):
            key_head = head // (num_heads // key_heads)
            state[:] = np.float32(0.0)
            if temporal_block[row] >= 0:
                place = (np.int64(temporal_block[row]) * num_heads + head) * size
                read_state(state, temporal_state, place, v_dim, k_dim)
            for i in range(num_replays[row]):
                place = (np.int64(replay_block[row, i]) * num_heads + head) * size
                decay, beta = read_inputs(temporal_state, place, b_k[:k_dim], b_v[:v_dim])
                for quad in range(num_quads):  # outputs that nobody looks at
                    delta_four_rows(flat_state, b_k, b_q, b_v, b_o, quad * ROWS, num_chunks, decay, beta, one)
            for token in range(start, stop):
                step = a_raw[token * a_stride + head] + dt_bias[head]
                if step <= LINEAR_ABOVE:
                    step = math.log1p(math.exp(step))
                decay = math.exp(step * A[head])
                beta = one / (one + math.exp(-b_raw[token * b_stride + head]))
                at = token * k_stride + key_head * k_dim
                copy_values(b_k[:k_dim], k[at : at + k_dim])
                _copy_scaled(b_k, b_k, one / math.sqrt(dot(b_k, b_k, num_chunks) + NORM_EPS))
                at = token * q_stride + key_head * k_dim
                copy_values(b_q[:k_dim], q[at : at + k_dim])
                _copy_scaled(b_q, b_q, one / math.sqrt(dot(b_q, b_q, num_chunks) + NORM_EPS) * query_scale)
                kq = dot(b_k, b_q, num_chunks)
                at = token * v_stride + head * v_dim
                copy_values(b_v[:v_dim], v[at : at + v_dim])
                for quad in range(num_quads):
                    delta_four_rows(flat_state, b_k, b_q, b_v, b_o, quad * ROWS, num_chunks, decay, beta, kq)
                copy_values(o[token, head], b_o[:v_dim])
                if state_block[token] >= 0:
                    place = (np.int64(state_block[token]) * num_heads + head) * size
                    if is_deferring[row] != 0 and token > start:
                        leave_inputs(temporal_state, place, b_k[:k_dim], b_v[:v_dim], decay, beta)
                    else:
                        leave_state(state, temporal_state, place, v_dim, k_dim)
