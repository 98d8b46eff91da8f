"""The gated delta rule on a GPU: two launches, of what the scan takes of each token, and of the scan.

Formula and contract: `kernels/gated_delta_rule.py`.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.mamba2_scan_triton import time_steps
from mambalign.kernels.rows import ROW_POINTERS, MambaRows
from mambalign.kernels.scan_tiles import (
    DELTA_ELEMENTS,
    NUM_WARPS,
    leave_inputs,
    load_left_inputs,
    load_quarters,
    store_quarters,
    tile_of,
)

NORM_EPS = 1e-6  # under the root of a key's and a query's length


@triton.jit
def delta_inputs_kernel(
    p_q, p_k, p_a_raw, p_b_raw, p_A, p_dt_bias, p_kq, p_gates, p_qk,
    Q_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr,
    K_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """[q | k] over their lengths, k . q, and [decay | beta] of a key head's value heads, in fp32, for the scan.

    Grid (tokens, key heads). A program owns a key head of a token and the GROUP value heads that use it: reads q, k,
    a_raw, b_raw; writes the three. One binary, so one order of addition.
    """
    wait_for_inputs(PDL)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    i_token, i_key = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_k, o_g = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_G)
    at = i_token * Q_STRIDE + i_key * K_DIM + o_k
    b_q = tl.load(p_q + at, mask=o_k < K_DIM, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + at, mask=o_k < K_DIM, other=0.0).to(tl.float32)
    b_q *= 1.0 / tl.sqrt(tl.sum(b_q * b_q, 0) + EPS) * (1.0 / tl.sqrt(K_DIM * 1.0))
    b_k *= 1.0 / tl.sqrt(tl.sum(b_k * b_k, 0) + EPS)
    p_out = p_qk + (i_token * KEY_HEADS + i_key) * (2 * K_DIM) + o_k
    tl.store(p_out, b_q, mask=o_k < K_DIM)
    tl.store(p_out + K_DIM, b_k, mask=o_k < K_DIM)
    tl.store(p_kq + i_token * KEY_HEADS + i_key, tl.sum(b_k * b_q, 0))
    o_head, mask = i_key * GROUP + o_g, o_g < GROUP
    b_a = tl.load(p_a_raw + i_token * A_STRIDE + o_head, mask=mask, other=0.0).to(tl.float32)
    b_a += tl.load(p_dt_bias + o_head, mask=mask, other=0.0)
    decay = tl.exp(time_steps(b_a, 0.0) * tl.load(p_A + o_head, mask=mask, other=0.0))
    b_b = tl.load(p_b_raw + i_token * A_STRIDE + o_head, mask=mask, other=0.0).to(tl.float32)
    p_out = p_gates + i_token * (2 * HEADS) + o_head
    tl.store(p_out, decay, mask=mask)
    tl.store(p_out + HEADS, 1.0 / (1.0 + tl.exp(-b_b)), mask=mask)


@triton.jit
def _token_inputs(
    p_v, p_kq, p_gates, p_q, i_token, o_v, o_i,
    V_STRIDE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, V_DIM: tl.constexpr, K_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """v, k . q, decay and beta of a token of the row; q and k by quarters."""
    token = i_token.to(tl.int64)
    b_v = tl.load(p_v + token * V_STRIDE, mask=o_v < V_DIM, other=0.0).to(tl.float32)
    kq = tl.load(p_kq + token * KEY_HEADS)
    decay, beta = tl.load(p_gates + token * (2 * HEADS)), tl.load(p_gates + token * (2 * HEADS) + HEADS)
    p_q += token * (KEY_HEADS * 2 * K_DIM)
    b_q0, b_q1, b_q2, b_q3 = load_quarters(p_q, o_i < K_DIM, o_i, K_DIM, BLOCK_I)
    b_k0, b_k1, b_k2, b_k3 = load_quarters(p_q + K_DIM, o_i < K_DIM, o_i, K_DIM, BLOCK_I)
    return b_v, kq, decay, beta, b_q0, b_q1, b_q2, b_q3, b_k0, b_k1, b_k2, b_k3


@triton.jit
def _product(b_h0, b_h1, b_h2, b_h3, b_x0, b_x1, b_x2, b_x3):
    """h x: a chain of fused multiply-adds over the quarters, then a sum."""
    b_sums = b_h0 * b_x0[None, :]
    b_sums = tl.fma(b_h1, tl.broadcast_to(b_x1[None, :], b_h1.shape), b_sums)
    b_sums = tl.fma(b_h2, tl.broadcast_to(b_x2[None, :], b_h2.shape), b_sums)
    b_sums = tl.fma(b_h3, tl.broadcast_to(b_x3[None, :], b_h3.shape), b_sums)
    return tl.sum(b_sums, 1)


@triton.jit
def _advance(b_h, b_delta, b_k, decay, STATE_DTYPE: tl.constexpr):
    """decay * h + delta outer k, rounded to the dtype of the state."""
    b_new = tl.fma(b_h, tl.broadcast_to(decay, b_h.shape), b_delta[:, None] * b_k[None, :])
    return b_new.to(STATE_DTYPE).to(tl.float32)


@triton.jit
def _update(
    b_h0, b_h1, b_h2, b_h3, b_hk, b_v, decay, beta, b_k0, b_k1, b_k2, b_k3, STATE_DTYPE: tl.constexpr
):  # fmt: skip
    """The state after a token, and its delta."""
    b_delta = beta * tl.fma(tl.broadcast_to(-decay, b_v.shape), b_hk, b_v)
    b_h0 = _advance(b_h0, b_delta, b_k0, decay, STATE_DTYPE)
    b_h1 = _advance(b_h1, b_delta, b_k1, decay, STATE_DTYPE)
    b_h2 = _advance(b_h2, b_delta, b_k2, decay, STATE_DTYPE)
    b_h3 = _advance(b_h3, b_delta, b_k3, decay, STATE_DTYPE)
    return b_h0, b_h1, b_h2, b_h3, b_delta


@triton.jit
def _step(
    b_h0, b_h1, b_h2, b_h3, b_v, kq, decay, beta, b_q0, b_q1, b_q2, b_q3, b_k0, b_k1, b_k2, b_k3,
    STATE_DTYPE: tl.constexpr,
):  # fmt: skip
    """The state after a token, and its o."""
    b_hk = _product(b_h0, b_h1, b_h2, b_h3, b_k0, b_k1, b_k2, b_k3)
    b_hq = _product(b_h0, b_h1, b_h2, b_h3, b_q0, b_q1, b_q2, b_q3)
    b_h0, b_h1, b_h2, b_h3, b_delta = _update(
        b_h0, b_h1, b_h2, b_h3, b_hk, b_v, decay, beta, b_k0, b_k1, b_k2, b_k3, STATE_DTYPE
    )
    b_o = tl.fma(b_delta, tl.broadcast_to(kq, b_v.shape), decay * b_hq)
    return b_h0, b_h1, b_h2, b_h3, b_o


@triton.jit
def _replay(
    b_h0, b_h1, b_h2, b_h3, p_tile, p_block, num_replays, o_r, o_i,
    STATE_SIZE: tl.constexpr, K_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_I: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
):  # fmt: skip
    """The state after drafts whose inputs were left: a block's number is loaded two of them ahead, its inputs one."""
    b_k0, b_k1, b_k2, b_k3, b_v, decay, beta = load_left_inputs(
        p_tile, tl.load(p_block, mask=num_replays > 0, other=-1), o_r, o_i, STATE_SIZE, K_DIM, BLOCK_V, BLOCK_I
    )  # fmt: skip
    block = tl.load(p_block + 1, mask=num_replays > 1, other=-1)
    for i in range(0, num_replays):
        n_k0, n_k1, n_k2, n_k3, n_v, n_decay, n_beta = load_left_inputs(
            p_tile, block, o_r, o_i, STATE_SIZE, K_DIM, BLOCK_V, BLOCK_I
        )
        block = tl.load(p_block + i + 2, mask=i + 2 < num_replays, other=-1)
        b_hk = _product(b_h0, b_h1, b_h2, b_h3, b_k0, b_k1, b_k2, b_k3)
        b_h0, b_h1, b_h2, b_h3, _ = _update(
            b_h0, b_h1, b_h2, b_h3, b_hk, b_v, decay, beta, b_k0, b_k1, b_k2, b_k3, STATE_DTYPE
        )
        b_k0, b_k1, b_k2, b_k3, b_v, decay, beta = n_k0, n_k1, n_k2, n_k3, n_v, n_decay, n_beta
    return b_h0, b_h1, b_h2, b_h3


@triton.jit(do_not_specialize=["num_spec_tokens"], do_not_specialize_on_alignment=ROW_POINTERS)
def gated_delta_rule_kernel(
    p_v, p_kq, p_gates, p_qk, p_temporal_state, p_o,
    p_query_start, p_query_len, p_temporal_block, p_state_block, p_is_deferring, p_num_replays, p_replay_block,
    num_spec_tokens, V_STRIDE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    V_DIM: tl.constexpr, K_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """d = beta * (v - decay * h k);  h = decay * h + d outer k;  o = h q, token after token; kept states go to blocks.

    Grid (tiles of all heads, rows). A program owns BLOCK_V rows of a head's state over all tokens of a row, in
    registers, in fp32, rounded to the state's dtype after every token, as four quarters [BLOCK_V, BLOCK_I]: few threads
    share a row of it. Reads inputs, temporal_block and what deferred drafts left in its tile of their blocks; writes o
    and the blocks of kept tokens. One binary serves prefill, decode, verification and boundaries. Two tokens a turn, as
    in `mamba2_scan_kernel`: a token's inputs are loaded, what the one before left is stored, then the one before is
    computed while the loads are under way.
    """
    wait_for_inputs(PDL)
    TILES: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    O_STRIDE: tl.constexpr = HEADS * V_DIM
    STATE_SIZE: tl.constexpr = HEADS * V_DIM * K_DIM
    STATE_DTYPE: tl.constexpr = p_temporal_state.dtype.element_ty
    i_head, i_row = tl.program_id(0) // TILES, tl.program_id(1)
    i_key = i_head // (HEADS // KEY_HEADS)
    start, num_tokens = tl.load(p_query_start + i_row).to(tl.int64), tl.load(p_query_len + i_row)
    o_v, o_i = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_I)
    p_v += start * V_STRIDE + i_head * V_DIM + o_v
    p_o += start * O_STRIDE + i_head * V_DIM + o_v
    p_kq += start * KEY_HEADS + i_key
    p_gates += start * (2 * HEADS) + i_head
    p_q = p_qk + (start * KEY_HEADS + i_key) * (2 * K_DIM) + o_i
    p_state_block += start
    if num_tokens > 0:
        v_mask, mask, o_n = o_v < V_DIM, (o_v < V_DIM)[:, None], o_i[None, :]
        p_head = p_temporal_state + i_head.to(tl.int64) * (V_DIM * K_DIM) + o_v[:, None] * K_DIM + o_n
        p_tile = p_temporal_state + i_head.to(tl.int64) * (V_DIM * K_DIM)
        p_tile += tl.program_id(0) % TILES * BLOCK_V * K_DIM
        block, last = tl.load(p_temporal_block + i_row), num_tokens - 1
        num_replays, is_deferring = tl.load(p_num_replays + i_row), tl.load(p_is_deferring + i_row)
        found = o_v < tl.where(block >= 0, V_DIM, 0)
        b_h0, b_h1, b_h2, b_h3 = load_quarters(
            p_head + block.to(tl.int64) * STATE_SIZE, found[:, None], o_n, K_DIM, BLOCK_I
        )
        a_v, a_kq, a_decay, a_beta, a_q0, a_q1, a_q2, a_q3, a_k0, a_k1, a_k2, a_k3 = _token_inputs(
            p_v, p_kq, p_gates, p_q, last * 0, o_v, o_i, V_STRIDE, HEADS, KEY_HEADS, V_DIM, K_DIM, BLOCK_I
        )
        a_kept, b_kept, b_o = tl.load(p_state_block), -1, tl.zeros([BLOCK_V], tl.float32)
        o_r, p_replay = tl.arange(0, BLOCK_V), p_replay_block + i_row.to(tl.int64) * num_spec_tokens
        b_h0, b_h1, b_h2, b_h3 = _replay(
            b_h0, b_h1, b_h2, b_h3, p_tile, p_replay, num_replays, o_r, o_i,
            STATE_SIZE, K_DIM, BLOCK_V, BLOCK_I, STATE_DTYPE,
        )  # fmt: skip
        # A tile of fewer numbers than threads, and what drafts left, are read by several: before one of them writes.
        tl.debug_barrier()
        for i_token in range(0, num_tokens, 2):
            i_b = tl.minimum(i_token + 1, last)
            b_v, b_kq, b_decay, b_beta, b_q0, b_q1, b_q2, b_q3, b_k0, b_k1, b_k2, b_k3 = _token_inputs(
                p_v, p_kq, p_gates, p_q, i_b, o_v, o_i, V_STRIDE, HEADS, KEY_HEADS, V_DIM, K_DIM, BLOCK_I
            )
            next_kept = tl.load(p_state_block + i_b, mask=is_deferring == 0, other=-1)
            if i_token > 0:
                tl.store(p_o, b_o, mask=v_mask)
                p_o += O_STRIDE
            if b_kept >= 0:
                p_kept = p_head + b_kept.to(tl.int64) * STATE_SIZE
                store_quarters(p_kept, mask, o_n, b_h0, b_h1, b_h2, b_h3, K_DIM, BLOCK_I)
            b_h0, b_h1, b_h2, b_h3, b_o = _step(
                b_h0, b_h1, b_h2, b_h3, a_v, a_kq, a_decay, a_beta, a_q0, a_q1, a_q2, a_q3, a_k0, a_k1, a_k2, a_k3,
                STATE_DTYPE,
            )  # fmt: skip

            b_kept = tl.where(i_token < last, next_kept, -1)
            i_a = tl.minimum(i_token + 2, last)
            a_v, a_kq, a_decay, a_beta, a_q0, a_q1, a_q2, a_q3, a_k0, a_k1, a_k2, a_k3 = _token_inputs(
                p_v, p_kq, p_gates, p_q, i_a, o_v, o_i, V_STRIDE, HEADS, KEY_HEADS, V_DIM, K_DIM, BLOCK_I
            )
            next_kept = tl.load(p_state_block + i_a, mask=is_deferring == 0, other=-1)
            tl.store(p_o, b_o, mask=v_mask)
            p_o += O_STRIDE
            if a_kept >= 0:
                p_kept = p_head + a_kept.to(tl.int64) * STATE_SIZE
                store_quarters(p_kept, mask, o_n, b_h0, b_h1, b_h2, b_h3, K_DIM, BLOCK_I)
            b_h0, b_h1, b_h2, b_h3, b_o = _step(
                b_h0, b_h1, b_h2, b_h3, b_v, b_kq, b_decay, b_beta, b_q0, b_q1, b_q2, b_q3, b_k0, b_k1, b_k2, b_k3,
                STATE_DTYPE,
            )  # fmt: skip
            a_kept = next_kept
        if last % 2 == 1:
            tl.store(p_o, b_o, mask=v_mask)
        if b_kept >= 0:
            p_kept = p_head + b_kept.to(tl.int64) * STATE_SIZE
            store_quarters(p_kept, mask, o_n, b_h0, b_h1, b_h2, b_h3, K_DIM, BLOCK_I)
        if is_deferring != 0:
            for i_token in range(1, num_tokens):
                b_v, _kq, b_decay, b_beta, _0, _1, _2, _3, b_k0, b_k1, b_k2, b_k3 = _token_inputs(
                    p_v, p_kq, p_gates, p_q, i_token, o_v, o_i, V_STRIDE, HEADS, KEY_HEADS, V_DIM, K_DIM, BLOCK_I
                )
                leave_inputs(
                    p_tile, tl.load(p_state_block + i_token), o_r, o_i, b_k0, b_k1, b_k2, b_k3, b_v, b_decay, b_beta,
                    STATE_SIZE, K_DIM, BLOCK_V, BLOCK_I,
                )  # fmt: skip


def gated_delta_rule_varlen_triton(
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
    """`gated_delta_rule_varlen_reference` in two launches."""
    (num_tokens, num_heads, v_dim), (key_heads, k_dim) = v.shape, k.shape[1:]
    assert q.stride(0) == k.stride(0) and a_raw.stride(0) == b_raw.stride(0), (q.stride(), k.stride())
    o = torch.empty(num_tokens, num_heads, v_dim, dtype=torch.float32, device=v.device)
    if num_tokens == 0 or len(rows.query_start) == 0:
        return o
    group, power, fp32 = num_heads // key_heads, triton.next_power_of_2, torch.float32
    kq = torch.empty(num_tokens, key_heads, dtype=fp32, device=v.device)
    gates = torch.empty(num_tokens, 2, num_heads, dtype=fp32, device=v.device)
    qk = torch.empty(num_tokens, key_heads, 2, k_dim, dtype=fp32, device=v.device)
    delta_inputs_kernel[num_tokens, key_heads](
        q, k, a_raw, b_raw, A, dt_bias, kq, gates, qk,
        q.stride(0), a_raw.stride(0), key_heads, group, k_dim, power(group), power(k_dim), NORM_EPS, num_warps=1,
        **pdl(v.device),
    )  # fmt: skip
    (block_v, block_i), deferral = tile_of(v_dim, k_dim, DELTA_ELEMENTS), rows.deferral
    gated_delta_rule_kernel[num_heads * triton.cdiv(v_dim, block_v), len(rows.query_start)](
        v, kq, gates, qk, temporal_state, o,
        rows.query_start, rows.query_len, rows.temporal_block, rows.state_block,
        deferral.is_deferring, deferral.num_replays, deferral.replay_block, deferral.replay_block.shape[1],
        v.stride(0), num_heads, key_heads, v_dim, k_dim, block_v, block_i, num_warps=NUM_WARPS, **pdl(v.device),
    )  # fmt: skip
    return o
