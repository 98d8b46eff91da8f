"""Rotary positions (arXiv 2104.09864), in place on queries and keys.

Formula, on the first 2 * half channels of each head, the others stay: for j < half and the angle of position p,

    x_j, x_{half+j} = x_j * cos_pj - x_{half+j} * sin_pj,  x_{half+j} * cos_pj + x_j * sin_pj      in fp32, rounded once

Cosines and sines come from a table with a line a position, so that a token's bits follow from its position alone,
wherever in a batch it lies: torch's own cos need not give an element the same bits at every place.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

LINES_TOGETHER = 4096  # of a table as it is filled: its angles need no second table's memory


def rotary_table(inv_freq: torch.Tensor, scale: float, num_positions: int) -> torch.Tensor:
    """[num_positions, 2, half] fp32: cosines, then sines, of position * inv_freq [half] (fp32), times scale."""
    table = torch.empty(num_positions, 2, len(inv_freq), dtype=torch.float32, device=inv_freq.device)
    for start in range(0, num_positions, LINES_TOGETHER):
        lines = table[start : start + LINES_TOGETHER]
        positions = torch.arange(start, start + len(lines), dtype=torch.float32, device=inv_freq.device)
        angles = positions[:, None] * inv_freq
        lines[:, 0], lines[:, 1] = angles.cos() * scale, angles.sin() * scale
    return table


@triton.jit
def _rotate(p_x, b_cos, b_sin, o_head, o_j, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Rotates a token's heads [NUM_HEADS, HEAD_DIM] in place."""
    mask = (o_head < NUM_HEADS)[:, None] & (o_j < HALF)[None, :]
    p_low = p_x + o_head[:, None] * HEAD_DIM + o_j[None, :]
    b_low = tl.load(p_low, mask=mask, other=0.0).to(tl.float32)
    b_high = tl.load(p_low + HALF, mask=mask, other=0.0).to(tl.float32)
    b_cos, b_sin = b_cos[None, :], b_sin[None, :]
    tl.store(p_low, (b_low * b_cos - b_high * b_sin).to(p_x.dtype.element_ty), mask=mask)
    tl.store(p_low + HALF, (b_high * b_cos + b_low * b_sin).to(p_x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["last_position"], do_not_specialize_on_alignment=["p_positions"])
def rotary_kernel(
    p_query, p_key, p_positions, p_table, last_position,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_J: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x_j, x_{half+j} = x_j cos - x_{half+j} sin, x_{half+j} cos + x_j sin, in place.

    Grid (tokens). A program owns a token: all heads of its query and its key.
    Reads the token's position and that line of the table; reads and writes the first 2 * HALF channels of each head.
    fp32, each pair of channels by itself, rounded once. A position past the table's end takes its last line.
    """
    wait_for_inputs(PDL)
    i_token = tl.program_id(0).to(tl.int64)
    o_j = tl.arange(0, BLOCK_J)
    position = tl.minimum(tl.maximum(tl.load(p_positions + i_token), 0), last_position)
    p_line = p_table + position.to(tl.int64) * (2 * HALF) + o_j
    b_cos = tl.load(p_line, mask=o_j < HALF, other=0.0)
    b_sin = tl.load(p_line + HALF, mask=o_j < HALF, other=0.0)
    o_head, o_kv = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_KV)
    _rotate(p_query + i_token * Q_STRIDE, b_cos, b_sin, o_head, o_j, NUM_HEADS, HEAD_DIM, HALF)
    _rotate(p_key + i_token * K_STRIDE, b_cos, b_sin, o_kv, o_j, KV_HEADS, HEAD_DIM, HALF)


def rotary_embed(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """Rotate query [T, heads, head_dim] and key [T, kv_heads, head_dim] in place to positions int64 [T].

    By torch operations whose bits do not depend on an element's place. table: of `rotary_table`, with half <=
    head_dim / 2; a position outside it takes the nearest line. Tokens of query and key may lie apart (views), the
    channels of one token not.
    """
    half = table.shape[2]
    cos, sin = table[positions.clamp(0, len(table) - 1)].unsqueeze(2).unbind(1)  # [T, 1, half]
    for x in (query, key):
        low, high = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = low * cos - high * sin, high * cos + low * sin
        x[..., :half], x[..., half : 2 * half] = turned


def rotary_embed_on_gpu(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """`rotary_embed` by the kernel."""
    (num_tokens, num_heads, head_dim), kv_heads, half = query.shape, key.shape[1], table.shape[2]
    if num_tokens:
        power = triton.next_power_of_2
        rotary_kernel[(num_tokens,)](
            query, key, positions, table, len(table) - 1, query.stride(0), key.stride(0),
            num_heads, kv_heads, head_dim, half, power(num_heads), power(kv_heads), power(half), **pdl(query.device),
        )  # fmt: skip
