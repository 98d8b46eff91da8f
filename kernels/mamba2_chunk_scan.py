"""The Mamba-2 recurrence over whole chunks of a prompt, as matrix products: a switch, several times faster on a GPU.

Formula (arXiv 2405.21060, section 6), per head, in a chunk with times t, s = 0 .. CHUNK-1; names as in
`kernels/mamba2_scan.py`, l_t = A * (dt_0 + .. + dt_t), h the state before the chunk:

    y_t = sum_{s <= t} exp(l_t - l_s) * dt_s * (C_t . B_s) * x_s  +  exp(l_t) * h C_t  +  D * x_t
    h  <- exp(l_last) * h + sum_s (exp(l_last - l_s) * dt_s * x_s) outer B_s

The numbers of the recurrence, rounded elsewhere, so the two never mix: a prompt's tokens go through here whenever they
are run, and a row starts at a multiple of CHUNK tokens of its text, so that chunks are the same ones however a prompt
is cut. A short last chunk gives its tokens the bits that a full one would. Products take operands in the dtype of x and
add in fp32. A 16-bit state is rounded to its dtype after every chunk, in the loop as in memory, so that a cut there
changes nothing.
"""

from math import log
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mambalign.kernels.activation import softplus
from mambalign.kernels.chunk_shape import MAMBA2_CHUNK as CHUNK
from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.mamba2_scan_triton import time_steps
from mambalign.kernels.rows import ROW_POINTERS, MambaRows, walk_rows

LOG2_E = tl.constexpr(1 / log(2))  # a power of 2 takes fewer instructions than one of e


class ChunkTiles(NamedTuple):
    """How the kernel divides its work. All but `chunk` leave the bits as they are."""

    chunk: int  # tokens; CHUNK but in a benchmark
    parts: int  # programs that share a head, if it has the 16 rows of the state for each that a product needs
    num_warps: int
    num_stages: int  # chunks whose inputs are on their way or in use


TILES = ChunkTiles(CHUNK, parts=1, num_warps=4, num_stages=3)  # `scripts/bench_kernels.py --tiles chunks`


@triton.jit
def chunk_inputs(
    p_x, p_dt_raw, start, num_tokens, i_head, o_t, o_p,
    X_STRIDE: tl.constexpr, DT_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """x [CHUNK, BLOCK_P] and dt_raw [CHUNK] of a head from token `start` on, with zeros after `num_tokens`."""
    token, in_row = start + o_t, o_t < num_tokens
    mask_x = in_row[:, None] & (o_p[None, :] < HEAD_DIM)
    b_x = tl.load(p_x + (token * X_STRIDE + i_head * HEAD_DIM)[:, None] + o_p[None, :], mask=mask_x, other=0.0)
    return b_x, tl.load(p_dt_raw + token * DT_STRIDE + i_head, mask=in_row, other=0.0)


@triton.jit(do_not_specialize_on_alignment=ROW_POINTERS)
def mamba2_chunk_scan_kernel(
    p_x, p_dt_raw, p_B, p_C, p_A, p_D, p_dt_bias, dt_min, p_temporal_state, p_y,
    p_query_start, p_query_len, p_temporal_block, p_state_block,
    X_STRIDE: tl.constexpr, DT_STRIDE: tl.constexpr, BC_STRIDE: tl.constexpr, GROUP_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The formulas above, chunk after chunk.

    Grid (heads * PARTS, rows). A program owns BLOCK_P rows of a head's state, [BLOCK_P, BLOCK_N], over all chunks of a
    row, in registers, in fp32. Reads inputs and temporal_block; writes y, and the state in the state_block of a chunk's
    last token. Products add in fp32 over a fixed K, whose entries past a token are zeros.
    """
    wait_for_inputs(PDL)
    STATE_DTYPE: tl.constexpr = p_temporal_state.dtype.element_ty
    i_head, i_part, num_heads = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.num_programs(0) // PARTS
    i_row = tl.program_id(1)
    start, num_tokens = tl.load(p_query_start + i_row).to(tl.int64), tl.load(p_query_len + i_row)
    o_t, o_p, o_n = tl.arange(0, CHUNK), i_part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    if num_tokens > 0:
        p_head = p_temporal_state + i_head.to(tl.int64) * (HEAD_DIM * D_STATE) + o_p[:, None] * D_STATE + o_n[None, :]
        mask_n, block = o_n[None, :] < D_STATE, tl.load(p_temporal_block + i_row)
        state_size = num_heads.to(tl.int64) * (HEAD_DIM * D_STATE)
        found = o_p < tl.where(block >= 0, HEAD_DIM, 0)
        b_h = tl.load(p_head + block.to(tl.int64) * state_size, mask=found[:, None] & mask_n, other=0.0).to(tl.float32)
        A, D, dt_bias = tl.load(p_A + i_head) * LOG2_E, tl.load(p_D + i_head), tl.load(p_dt_bias + i_head)
        b_x, b_raw = chunk_inputs(p_x, p_dt_raw, start, num_tokens, i_head, o_t, o_p, X_STRIDE, DT_STRIDE, HEAD_DIM)
        for first in tl.range(0, num_tokens, CHUNK, num_stages=NUM_STAGES):
            in_row = o_t < num_tokens - first
            token = start + first + o_t
            mask_x, mask_bc = in_row[:, None] & (o_p[None, :] < HEAD_DIM), in_row[:, None] & mask_n
            then = first + CHUNK  # the compiler does not bring these two ahead of their use
            b_next_x, b_next_raw = chunk_inputs(
                p_x, p_dt_raw, start + then, num_tokens - then, i_head, o_t, o_p, X_STRIDE, DT_STRIDE, HEAD_DIM
            )
            b_dt = tl.where(in_row, time_steps(b_raw.to(tl.float32) + dt_bias, dt_min), 0.0)
            o_bc = (token * BC_STRIDE + i_head // GROUP_HEADS * D_STATE)[:, None] + o_n[None, :]
            b_B, b_C = tl.load(p_B + o_bc, mask=mask_bc, other=0.0), tl.load(p_C + o_bc, mask=mask_bc, other=0.0)

            b_l = tl.cumsum(b_dt * A, 0)
            last = tl.sum(tl.where(o_t == CHUNK - 1, b_l, 0.0), 0)
            b_gap = tl.where(o_t[:, None] >= o_t[None, :], b_l[:, None] - b_l[None, :], float("-inf"))
            b_mix = tl.dot(b_C, tl.trans(b_B), input_precision="ieee") * (tl.exp2(b_gap) * b_dt[None, :])
            b_y = tl.dot(b_C, tl.trans(b_h).to(b_C.dtype), input_precision="ieee") * tl.exp2(b_l)[:, None]
            b_y += tl.dot(b_mix.to(b_x.dtype), b_x, input_precision="ieee")
            b_y = tl.fma(tl.broadcast_to(D, b_y.shape), b_x.to(tl.float32), b_y)
            p_token = p_y + ((token * num_heads + i_head) * HEAD_DIM)[:, None] + o_p[None, :]
            tl.store(p_token, b_y, mask=mask_x)

            b_left = b_x.to(tl.float32) * (tl.exp2(last - b_l) * b_dt)[:, None]
            b_new = tl.dot(tl.trans(b_left.to(b_x.dtype)), b_B, input_precision="ieee")
            b_h = tl.fma(b_h, tl.broadcast_to(tl.exp2(last), b_h.shape), b_new)
            b_h = b_h.to(STATE_DTYPE).to(tl.float32)
            kept = tl.load(p_state_block + start + tl.minimum(then, num_tokens) - 1)
            if kept >= 0:
                p_kept = p_head + kept.to(tl.int64) * state_size
                tl.store(p_kept, b_h.to(STATE_DTYPE), mask=(o_p < HEAD_DIM)[:, None] & mask_n)
            b_x, b_raw = b_next_x, b_next_raw


def mamba2_chunk_scan_varlen_reference(
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
    y: torch.Tensor | None = None,
) -> torch.Tensor:
    """`mamba2_scan_varlen_reference` by chunks: arguments and result are the same.

    Prefill rows only, each from a multiple of CHUNK tokens of its text. `state_block` is looked at for the last token
    of a chunk, full or not. y: where the rows' tokens go, [T, heads, head_dim] in fp32; None for a new one.
    """
    group_heads = x.shape[1] // B.shape[1]
    if y is None:
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    is_past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()

    def advance(first: int, stop: int, state: torch.Tensor) -> torch.Tensor:
        dt = softplus(dt_raw[first:stop] + dt_bias).clamp(min=dt_min)
        dt = by_head(dt[:, :, None], CHUNK)  # [heads, CHUNK, 1]
        b_x = by_head(x[first:stop], CHUNK)
        b_B, b_C = (by_head(t[first:stop], CHUNK).repeat_interleave(group_heads, 0) for t in (B, C))
        log_decay = (dt * A[:, None, None]).cumsum(1)
        last = log_decay[:, -1:]
        gap = (log_decay - log_decay.transpose(1, 2)).masked_fill(~is_past, -torch.inf)
        mix = (b_C @ b_B.transpose(1, 2)) * gap.exp() * dt.transpose(1, 2)
        b_y = mix @ b_x + log_decay.exp() * (b_C @ state.transpose(1, 2)) + D[:, None, None] * b_x
        y[first:stop] = b_y.transpose(0, 1)[: stop - first]
        left = b_x * ((last - log_decay).exp() * dt)
        return last.exp() * state + left.transpose(1, 2) @ b_B

    walk_rows(rows, temporal_state, advance, CHUNK)
    return y


def by_head(tokens: torch.Tensor, chunk: int) -> torch.Tensor:
    """[up to `chunk` tokens, heads, width] as [heads, chunk, width] in fp32, with zeros for the missing tokens."""
    return F.pad(tokens.float(), (0, 0, 0, 0, 0, chunk - len(tokens))).transpose(0, 1).contiguous()


def mamba2_chunk_scan_varlen_triton(
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
    y: torch.Tensor | None = None,
    tiles: ChunkTiles = TILES,
) -> torch.Tensor:
    """`mamba2_chunk_scan_varlen_reference` in one launch. tiles: others in a benchmark."""
    num_tokens, num_heads, head_dim = x.shape
    num_groups, d_state = B.shape[1:]
    assert B.stride(0) == C.stride(0), (B.stride(), C.stride())
    if y is None:
        y = torch.empty(num_tokens, num_heads, head_dim, dtype=torch.float32, device=x.device)
    if num_tokens == 0 or len(rows.query_start) == 0:
        return y
    block_p, block_n = (max(16, triton.next_power_of_2(size)) for size in (head_dim, d_state))  # a product's least
    parts = min(tiles.parts, block_p // 16)
    mamba2_chunk_scan_kernel[num_heads * parts, len(rows.query_start)](
        x, dt_raw, B, C, A, D, dt_bias, dt_min, temporal_state, y,
        rows.query_start, rows.query_len, rows.temporal_block, rows.state_block,
        x.stride(0), dt_raw.stride(0), B.stride(0), num_heads // num_groups, head_dim, d_state,
        tiles.chunk, parts, block_p // parts, block_n, tiles.num_stages, num_warps=tiles.num_warps,
        **pdl(x.device),
    )  # fmt: skip
    return y


def mamba2_chunk_scan_varlen(
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
    y: torch.Tensor | None = None,
) -> torch.Tensor:
    """`mamba2_chunk_scan_varlen_reference`; on a GPU one launch, on a CPU the reference itself."""
    assert temporal_state.is_contiguous() and A.dtype == D.dtype == dt_bias.dtype == torch.float32
    run = mamba2_chunk_scan_varlen_triton if x.is_cuda else mamba2_chunk_scan_varlen_reference
    return run(x, dt_raw, B, C, A, D, dt_bias, dt_min, temporal_state, rows, y)
