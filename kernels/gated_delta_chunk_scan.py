"""The gated delta rule over whole chunks of a prompt, as matrix products: a switch, several times faster on a GPU.

Formulas (arXiv 2412.06464, section 3, and the WY form of arXiv 2406.06484), per value head, in a chunk with tokens
t, s = 0 .. DELTA_CHUNK-1; names as in `kernels/gated_delta_rule.py`, l_t the sum of the log-decays of tokens 0 .. t, h
the state before the chunk, keys and queries over their lengths, queries over sqrt(k_dim):

    a_ts = beta_t * exp(l_t - l_s) * (k_t . k_s)  for s < t, else 0;   X = (I + a)^-1
    W = X (beta * exp(l) * k),  U = X (beta * v)                       W [C, k_dim], U [C, v_dim]
    D = U - W h^T                                                      the values that the tokens add
    o_t = exp(l_t) * h q_t  +  sum_{s <= t} exp(l_t - l_s) * (q_t . k_s) * D_s
    h  <- exp(l_last) * h  +  sum_s D_s outer (exp(l_last - l_s) * k_s)

The numbers of the recurrence, rounded elsewhere, so the two never mix: a prompt's tokens go through here whenever they
are run, and a row starts at a multiple of DELTA_CHUNK tokens of its text, so that chunks are the same ones however a
prompt is cut. A short last chunk gives its tokens the bits that a full one would. Decays are exponentials of
differences that are never positive; l is added up in fp64, as one token that forgets all would else take the last bits
of its neighbours' decays. X is made in fp32; other products take operands in the dtype of v and add in fp32.
A 16-bit state is rounded to its dtype after every chunk, in the loop as in memory, so that a cut there changes nothing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mambalign.kernels.activation import softplus
from mambalign.kernels.chunk_shape import DELTA_CHUNK
from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.gated_delta_chunk_solve import gated_delta_chunk_solve_kernel
from mambalign.kernels.gated_delta_rule import NORM_EPS, unit
from mambalign.kernels.mamba2_chunk_scan import by_head
from mambalign.kernels.rows import ROW_POINTERS, MambaRows, walk_rows

STATE_ROWS = 32  # that a program carries over the chunks of a text
CHECKED_TO = 0.03  # of the largest value: 16-bit operands were found within 0.01
ROWS_AT_A_TIME = 64  # among which a program of the first launch looks for its chunk


class Tiles(NamedTuple):
    """Of both launches: a head's numbers, powers of two; rows of a state that a program of the second carries."""

    block_v: int
    block_k: int
    state_rows: int
    num_warps: int
    num_stages: int  # of the second


def tiles_for(v_dim: int, k_dim: int, number_bytes: int) -> Tiles:
    """For heads of these sizes.

    Four warps are those of one product of 64 rows; heads below 64 numbers take two, since products of a whole warp
    group came out wrong at 16 columns (Triton 3.6). With three stages, where they fit, a chunk's inputs are loaded
    while the two before are computed; with two the loads come too late.
    """
    block_v, block_k = (max(16, triton.next_power_of_2(size)) for size in (v_dim, k_dim))  # a product's least
    num_warps = 4 if min(block_v, block_k) >= 64 else 2
    num_stages = 3 if number_bytes == 2 and 64 <= block_k <= 128 else 1
    return Tiles(block_v, block_k, min(block_v, STATE_ROWS), num_warps, num_stages)


@triton.jit
def chunk_scales(p_scale, num_tokens, o_t, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """Of a head's chunk that begins at p_scale: the scales of its h q [CHUNK], and the decay over its tokens."""
    last = tl.minimum(num_tokens, CHUNK) - 1
    b_scale = tl.load(p_scale + 1 + o_t * (2 * HEADS), mask=o_t < num_tokens, other=0.0)
    return b_scale, tl.load(p_scale + last * (2 * HEADS), mask=last >= 0, other=0.0)


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def gated_delta_chunk_scan_kernel(
    p_q, p_w, p_u, p_left, p_mix, p_scale, p_temporal_state, p_o,
    p_query_start, p_query_len, p_temporal_block, p_state_block,
    Q_STRIDE: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, V_DIM: tl.constexpr, K_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """D, o and h of the formulas above, chunk after chunk, from what `gated_delta_chunk_solve_kernel` left.

    Grid (tiles of all heads, rows). A program owns BLOCK_V rows of a head's state over all chunks of a row, as its
    transpose [BLOCK_K, BLOCK_V], in registers, in fp32. Reads inputs and temporal_block; writes o, and the state in the
    state_block of a chunk's last token. Products add in fp32 over a fixed K, whose entries past a token are zeros.
    """
    wait_for_inputs(PDL)
    TILES: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    STATE_SIZE: tl.constexpr = HEADS * V_DIM * K_DIM
    STATE_DTYPE: tl.constexpr = p_temporal_state.dtype.element_ty
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    i_head, i_row = tl.program_id(0) // TILES, tl.program_id(1)
    i_key = i_head // (HEADS // KEY_HEADS)
    start, num_tokens = tl.load(p_query_start + i_row).to(tl.int64), tl.load(p_query_len + i_row)
    if num_tokens > 0:
        o_t, o_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
        o_v = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_h, block = (o_k < K_DIM)[:, None] & (o_v < V_DIM)[None, :], tl.load(p_temporal_block + i_row)
        p_head = p_temporal_state + i_head.to(tl.int64) * (V_DIM * K_DIM) + o_v[None, :] * K_DIM + o_k[:, None]
        p_h = p_head + block.to(tl.int64) * STATE_SIZE
        b_h = tl.load(p_h, mask=mask_h & (o_k < tl.where(block >= 0, K_DIM, 0))[:, None], other=0.0).to(tl.float32)
        to_k, to_v = o_t[:, None] * (HEADS * K_DIM) + o_k[None, :], o_t[:, None] * (HEADS * V_DIM) + o_v[None, :]
        to_q, to_t = o_t[:, None] * Q_STRIDE + o_k[None, :], o_t[:, None] * (HEADS * CHUNK) + o_t[None, :]
        p_scale += 2 * (start * HEADS + i_head)
        b_scale, decay = chunk_scales(p_scale, num_tokens, o_t, HEADS, CHUNK)
        for first in range(0, num_tokens, CHUNK):
            in_row, token, then = o_t < num_tokens - first, start + first, first + CHUNK
            of_head = token * HEADS + i_head
            p_scale += 2 * HEADS * CHUNK
            b_next_scale, next_decay = chunk_scales(p_scale, num_tokens - then, o_t, HEADS, CHUNK)
            mask_k, mask_v = in_row[:, None] & (o_k < K_DIM)[None, :], in_row[:, None] & (o_v < V_DIM)[None, :]
            b_w = tl.load(p_w + of_head * K_DIM + to_k, mask=mask_k, other=0.0)
            b_left = tl.load(p_left + of_head * K_DIM + to_k, mask=mask_k, other=0.0)
            b_q = tl.load(p_q + token * Q_STRIDE + i_key * K_DIM + to_q, mask=mask_k, other=0.0)
            b_u = tl.load(p_u + of_head * V_DIM + to_v, mask=mask_v, other=0.0)
            b_mix = tl.load(p_mix + of_head * CHUNK + to_t, mask=in_row[:, None], other=0.0)
            kept = tl.load(p_state_block + start + tl.minimum(then, num_tokens) - 1)

            b_before = b_h.to(DTYPE)
            b_d = b_u.to(tl.float32) - tl.dot(b_w, b_before, input_precision="ieee")
            b_o = tl.dot(b_q, b_before, input_precision="ieee") * b_scale[:, None]
            b_o = tl.dot(b_mix, b_d.to(DTYPE), b_o, input_precision="ieee")
            tl.store(p_o + of_head * V_DIM + to_v, b_o, mask=mask_v)
            b_h = tl.dot(tl.trans(b_left), b_d.to(DTYPE), b_h * decay, input_precision="ieee")
            b_h = b_h.to(STATE_DTYPE).to(tl.float32)
            if kept >= 0:
                tl.store(p_head + kept.to(tl.int64) * STATE_SIZE, b_h.to(STATE_DTYPE), mask=mask_h)
            b_scale, decay = b_next_scale, next_decay


def gated_delta_chunk_scan_varlen_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a_raw: torch.Tensor,
    b_raw: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    temporal_state: torch.Tensor,
    rows: MambaRows,
    o: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gated_delta_rule_varlen_reference` by chunks: arguments and result are the same.

    Prefill rows only, each from a multiple of DELTA_CHUNK tokens of its text. `state_block` is looked at for the last
    token of a chunk, full or not. o: where the rows' tokens go, [T, heads, v_dim] in fp32; None for a new one.
    """
    per_key_head, k_dim, v_dim = v.shape[1] // k.shape[1], k.shape[2], v.shape[2]
    if o is None:
        o = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    identity = torch.eye(DELTA_CHUNK, device=v.device)
    is_past = torch.ones_like(identity, dtype=torch.bool).tril()

    def advance(first: int, stop: int, state: torch.Tensor) -> torch.Tensor:
        in_row = torch.arange(DELTA_CHUNK, device=v.device)[:, None] < stop - first
        b_q, b_k, b_v = (by_head(t[first:stop], DELTA_CHUNK) for t in (q, k, v))  # first, for shapes always alike
        b_q, b_k = (unit(t).repeat_interleave(per_key_head, 0) for t in (b_q, b_k))
        b_a, b_b = (by_head(t[first:stop, :, None], DELTA_CHUNK) for t in (a_raw, b_raw))  # [heads, CHUNK, 1]
        beta = torch.sigmoid(b_b) * in_row
        log_decay = (softplus(b_a + dt_bias[:, None, None]) * A[:, None, None] * in_row).double().cumsum(1)
        from_start, to_end = log_decay.float().exp(), (log_decay[:, -1:] - log_decay).float().exp()
        gap = (log_decay - log_decay.transpose(1, 2)).float().masked_fill(~is_past, -torch.inf).exp()
        lower = (beta * gap * (b_k @ b_k.transpose(1, 2))).tril(-1) + identity
        right = beta * torch.cat([from_start * b_k, b_v], 2)
        solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        w, u = solved.split([k_dim, v_dim], 2)
        added = u - w @ state.transpose(1, 2)
        b_o = from_start * (b_q @ state.transpose(1, 2)) + (gap * (b_q @ b_k.transpose(1, 2))) @ added
        o[first:stop] = (b_o * k_dim**-0.5).transpose(0, 1)[: stop - first]
        return from_start[:, -1:] * state + added.transpose(1, 2) @ (to_end * b_k)

    walk_rows(rows, temporal_state, advance, DELTA_CHUNK)
    return o


def gated_delta_chunk_scan_varlen_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a_raw: torch.Tensor,
    b_raw: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    temporal_state: torch.Tensor,
    rows: MambaRows,
    o: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gated_delta_chunk_scan_varlen_reference` in two launches: all chunks side by side, then chunk after chunk."""
    (num_tokens, num_heads, v_dim), (key_heads, k_dim) = v.shape, k.shape[1:]
    assert q.stride(0) == k.stride(0) and a_raw.stride(0) == b_raw.stride(0), (q.stride(), k.stride())
    if o is None:
        o = torch.empty(num_tokens, num_heads, v_dim, dtype=torch.float32, device=v.device)
    num_rows = len(rows.query_start)
    if num_tokens == 0 or num_rows == 0:
        return o
    w, left = (torch.empty(num_tokens, num_heads, k_dim, dtype=v.dtype, device=v.device) for _ in range(2))
    u = torch.empty(num_tokens, num_heads, v_dim, dtype=v.dtype, device=v.device)
    mix = torch.empty(num_tokens, num_heads, DELTA_CHUNK, dtype=v.dtype, device=v.device)
    scale = torch.empty(num_tokens, num_heads, 2, dtype=torch.float32, device=v.device)
    block_v, block_k, state_rows, num_warps, num_stages = tiles_for(v_dim, k_dim, v.element_size())
    most_chunks = num_tokens // DELTA_CHUNK + num_rows
    gated_delta_chunk_solve_kernel[num_heads, most_chunks](
        q, k, v, a_raw, b_raw, A, dt_bias, rows.query_start, rows.query_len, num_rows, w, u, left, mix, scale,
        q.stride(0), v.stride(0), a_raw.stride(0), num_heads, key_heads, v_dim, k_dim, DELTA_CHUNK, block_v, block_k,
        ROWS_AT_A_TIME, NORM_EPS, num_warps=num_warps, **pdl(v.device),
    )  # fmt: skip
    gated_delta_chunk_scan_kernel[num_heads * triton.cdiv(v_dim, state_rows), num_rows](
        q, w, u, left, mix, scale, temporal_state, o,
        rows.query_start, rows.query_len, rows.temporal_block, rows.state_block,
        q.stride(0), num_heads, key_heads, v_dim, k_dim, DELTA_CHUNK, state_rows, block_k,
        num_warps=num_warps, num_stages=num_stages, **pdl(v.device),
    )  # fmt: skip
    return o


def gated_delta_chunk_scan_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a_raw: torch.Tensor,
    b_raw: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    temporal_state: torch.Tensor,
    rows: MambaRows,
    o: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gated_delta_chunk_scan_varlen_reference`; on a GPU two launches, on a CPU the reference itself."""
    assert temporal_state.is_contiguous() and A.dtype == dt_bias.dtype == torch.float32
    run = gated_delta_chunk_scan_varlen_triton if v.is_cuda else gated_delta_chunk_scan_varlen_reference
    return run(q, k, v, a_raw, b_raw, A, dt_bias, temporal_state, rows, o)


def chunks_are_right(
    num_heads: int,
    key_heads: int,
    v_dim: int,
    k_dim: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device | str,
) -> bool:
    """Whether the launches give the reference's values on this device, for heads of a model's sizes.

    Two rows, one of them from a state, each with a short last chunk; keys that almost repeat in one of them.
    """
    lengths, generator = (2 * DELTA_CHUNK + 22, DELTA_CHUNK + 6), torch.Generator().manual_seed(0)
    num_tokens, num_states = sum(lengths), 4
    shapes = [(key_heads, k_dim), (key_heads, k_dim), (num_heads, v_dim), (num_heads,), (num_heads,)]
    inputs = [torch.randn(num_tokens, *shape, generator=generator) for shape in shapes]
    inputs[1][lengths[0] :] = inputs[1][lengths[0]] + 0.01 * inputs[1][lengths[0] :]
    inputs = [each.to(dtype).to(device) for each in inputs]
    A, dt_bias = -torch.rand(num_heads, generator=generator), torch.randn(num_heads, generator=generator)
    state_block = torch.full((num_tokens,), -1, dtype=torch.int32)
    state_block[[DELTA_CHUNK - 1, lengths[0] - 1, num_tokens - 1]] = torch.arange(1, num_states, dtype=torch.int32)
    of_rows = [[0, lengths[0]], lengths, [0, 3], [0, 0], [-1, 0], [0, 0]]  # the second row begins in block 0
    query_start, query_len, conv_block, conv_offset, temporal_block, is_decode = (
        torch.tensor(each, dtype=torch.int32, device=device) for each in of_rows
    )
    rows = MambaRows(
        query_start=query_start,
        query_len=query_len,
        max_query_len=max(lengths),
        conv_block=conv_block,
        conv_offset=conv_offset,
        temporal_block=temporal_block,
        is_decode=is_decode,
        state_block=state_block.to(device),
        all_decode=False,
    )
    states = torch.randn(num_states, num_heads, v_dim, k_dim, generator=generator).to(state_dtype).to(device)
    results = []
    for run in (gated_delta_chunk_scan_varlen_reference, gated_delta_chunk_scan_varlen):
        state = states.clone()
        results.append((run(*inputs, A.to(device), dt_bias.to(device), state, rows), state.float()))
    return all(
        bool((got - want).abs().max() <= CHECKED_TO * want.abs().max()) for want, got in zip(*results, strict=True)
    )
