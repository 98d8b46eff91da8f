"""What the tokens of a chunk are to each other, before any state is known: all chunks of a step side by side.

Formulas, names and rounding: `kernels/gated_delta_chunk_scan.py`.
"""

import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import wait_for_inputs
from mambalign.kernels.mamba2_scan_triton import time_steps
from mambalign.kernels.rows import ROW_POINTERS


@triton.jit
def find_chunk(p_query_len, num_rows, i_chunk, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Row of the step's i-th chunk, counted row after row, and its place there; row -1 if the step has fewer."""
    row, place, seen = -1, 0, 0
    for first in range(0, num_rows, BLOCK_R):
        o_r = first + tl.arange(0, BLOCK_R)
        b_count = tl.cdiv(tl.load(p_query_len + o_r, mask=o_r < num_rows, other=0), CHUNK)
        b_end = seen + tl.cumsum(b_count, 0)
        is_here = (b_end > i_chunk) & (b_end - b_count <= i_chunk)
        row = tl.maximum(row, tl.max(tl.where(is_here, o_r, -1), 0))
        place += tl.sum(tl.where(is_here, i_chunk - b_end + b_count, 0), 0)
        seen += tl.sum(b_count, 0)
    return row, place


@triton.jit
def _upper_half(b_x):
    """fp32 cut to what a tf32 operand holds."""
    return (b_x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _add_product(b_sum, b_x, b_y):
    """sum + x y near the accuracy of fp32: both in two halves of their mantissas, without the lower halves' product."""
    x_upper, y_upper = _upper_half(b_x), _upper_half(b_y)
    b_sum = tl.dot(x_upper, b_y - y_upper, b_sum, input_precision="tf32")
    b_sum = tl.dot(b_x - x_upper, y_upper, b_sum, input_precision="tf32")
    return tl.dot(x_upper, y_upper, b_sum, input_precision="tf32")


@triton.jit
def _join_pairs(b_a, b_x, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """From the inverses of blocks of WIDTH those of twice the size: [[x, 0], [-y a x, y]]."""
    o_block = tl.arange(0, SIZE) // WIDTH
    is_below = (o_block[:, None] % 2 == 1) & (o_block[None, :] == o_block[:, None] - 1)
    b_below = _add_product(tl.zeros([SIZE, SIZE], tl.float32), tl.where(is_below, -b_a, 0.0), b_x)
    return _add_product(b_x, b_x, b_below)


@triton.jit
def inverse_of_unit_lower(b_a, SIZE: tl.constexpr):
    """(I + a)^-1 in fp32, for an `a` [SIZE, SIZE] in fp32 that is zero on its diagonal and above.

    Four blocks on the diagonal by forward substitution, side by side, a row at a time; then pairs of blocks, twice.
    No power of `a` is taken: that of repeated keys has entries like binomial coefficients, its inverse none above 1.
    """
    BLOCK: tl.constexpr = SIZE // 4
    o_n, o_t = tl.arange(0, 4), tl.arange(0, BLOCK)
    on_diagonal = o_n[:, None, None, None] == o_n[None, None, :, None]
    b_blocks = tl.sum(tl.where(on_diagonal, tl.reshape(b_a, [4, BLOCK, 4, BLOCK]), 0.0), 2)
    b_columns = tl.permute(b_blocks, [0, 2, 1])
    b_x = tl.zeros([4, BLOCK, BLOCK], tl.float32) + tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)[None]
    for i in range(1, BLOCK):
        b_row = tl.sum(tl.where(o_t[None, None, :] == i, b_columns, 0.0), 2)
        b_sum = tl.sum(b_row[:, :, None] * b_x, 1)
        b_x = tl.where(o_t[None, :, None] == i, b_x - b_sum[:, None, :], b_x)
    b_x = tl.reshape(tl.where(on_diagonal, b_x[:, :, None, :], 0.0), [SIZE, SIZE])
    return _join_pairs(b_a, _join_pairs(b_a, b_x, BLOCK, SIZE), 2 * BLOCK, SIZE)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROW_POINTERS)
def gated_delta_chunk_solve_kernel(
    p_q, p_k, p_v, p_a_raw, p_b_raw, p_A, p_dt_bias, p_query_start, p_query_len, num_rows,
    p_w, p_u, p_left, p_mix, p_scale,
    Q_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr, V_DIM: tl.constexpr, K_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """W, U, the keys that a chunk leaves, the mix of its values, and per token (decay, scale of h q).

    Grid (heads, chunks of the step). A program owns a head of a chunk: reads its q, k, v, a, b; writes the five for its
    tokens, in the dtype of k but for the scales. Keys and queries stay as they are in products, which are scaled in
    fp32 by what makes them unit vectors. One binary, so one order of addition.
    """
    wait_for_inputs(PDL)
    i_head = tl.program_id(0)
    i_key = i_head // (HEADS // KEY_HEADS)
    i_row, place = find_chunk(p_query_len, num_rows, tl.program_id(1), CHUNK, BLOCK_R)
    if i_row >= 0:
        first = place * CHUNK
        o_t, o_v, o_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
        in_row = o_t < tl.load(p_query_len + i_row) - first
        mask_k, mask_v = in_row[:, None] & (o_k < K_DIM)[None, :], in_row[:, None] & (o_v < V_DIM)[None, :]
        start = tl.load(p_query_start + i_row).to(tl.int64) + first
        of_head = start * HEADS + i_head
        at_k, from_k = start * Q_STRIDE + i_key * K_DIM, o_t[:, None] * Q_STRIDE + o_k[None, :]
        b_k = tl.load(p_k + at_k + from_k, mask=mask_k, other=0.0)
        b_q = tl.load(p_q + at_k + from_k, mask=mask_k, other=0.0)
        at_gate, to_gate = start * A_STRIDE + i_head, o_t * A_STRIDE
        b_raw = tl.load(p_a_raw + at_gate + to_gate, mask=in_row, other=0.0).to(tl.float32)
        b_step = time_steps(b_raw + tl.load(p_dt_bias + i_head), 0.0) * tl.load(p_A + i_head)
        b_step = tl.where(in_row, b_step, 0.0)
        b_raw = tl.load(p_b_raw + at_gate + to_gate, mask=in_row, other=0.0).to(tl.float32)
        b_beta = tl.where(in_row, 1.0 / (1.0 + tl.exp(-b_raw)), 0.0)

        f_k, f_q = b_k.to(tl.float32), b_q.to(tl.float32)
        b_k_scale = 1.0 / tl.sqrt(tl.sum(f_k * f_k, 1) + EPS)
        b_q_scale = 1.0 / tl.sqrt(tl.sum(f_q * f_q, 1) + EPS) * (1.0 / tl.sqrt(K_DIM * 1.0))
        b_l = tl.cumsum(b_step.to(tl.float64), 0)
        b_decay, last = tl.exp(b_l.to(tl.float32)), tl.sum(tl.where(o_t == CHUNK - 1, b_l, 0.0), 0)
        b_to_end = tl.exp((last - b_l).to(tl.float32)) * b_k_scale
        p_out = p_scale + 2 * of_head + o_t * (2 * HEADS)
        tl.store(p_out, b_decay, mask=in_row)
        tl.store(p_out + 1, b_decay * b_q_scale, mask=in_row)

        is_past = o_t[:, None] >= o_t[None, :]
        b_gap = tl.where(is_past, (b_l[:, None] - b_l[None, :]).to(tl.float32), float("-inf"))
        b_gap = tl.exp(b_gap) * b_k_scale[None, :]
        b_mix = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * (b_gap * b_q_scale[:, None])
        p_out = p_mix + of_head * CHUNK + (o_t[:, None] * (HEADS * CHUNK) + o_t[None, :])
        tl.store(p_out, b_mix.to(b_k.dtype), mask=in_row[:, None])
        b_a = tl.dot(b_k, tl.trans(b_k), input_precision="ieee") * (b_gap * (b_beta * b_k_scale)[:, None])
        b_x = inverse_of_unit_lower(tl.where(o_t[:, None] > o_t[None, :], b_a, 0.0), CHUNK)

        b_x *= b_beta[None, :]
        p_v += start * V_STRIDE + i_head * V_DIM
        b_v = tl.load(p_v + (o_t[:, None] * V_STRIDE + o_v[None, :]), mask=mask_v, other=0.0)
        b_u = tl.dot(b_x.to(b_k.dtype), b_v, input_precision="ieee")
        to_v = o_t[:, None] * (HEADS * V_DIM) + o_v[None, :]
        tl.store(p_u + of_head * V_DIM + to_v, b_u.to(b_k.dtype), mask=mask_v)
        b_x *= (b_decay * b_k_scale)[None, :]
        b_k = tl.load(p_k + at_k + from_k, mask=mask_k, other=0.0)  # again: registers are short in between
        to_k = o_t[:, None] * (HEADS * K_DIM) + o_k[None, :]
        b_w = tl.dot(b_x.to(b_k.dtype), b_k, input_precision="ieee")
        tl.store(p_w + of_head * K_DIM + to_k, b_w.to(b_k.dtype), mask=mask_k)
        b_left = (b_k.to(tl.float32) * b_to_end[:, None]).to(b_k.dtype)
        tl.store(p_left + of_head * K_DIM + to_k, b_left, mask=mask_k)
