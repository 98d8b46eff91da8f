"""The head that drafts are taken from: a copy of the model's in fp8 (e4m3), and its best token without any logits.

A draft is a proposal that the target checks, so a copy of half the bytes may make it, in an order of addition that is
nobody's business. Each token of the vocabulary has a scale of its own; so has each hidden state, which changes no order
and is dropped. Products are fp8 times fp8, added by tensor cores, which keep fewer bits of such sums than of others:
the error is small beside that of rounding to fp8.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from mambalign.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, pdl, wait_for_inputs
from mambalign.kernels.launch import runs_kernel
from mambalign.kernels.linear_tiles import Tiles
from mambalign.kernels.linear_triton import WORD_BYTES
from mambalign.kernels.sampling import NO_ID, argmax_rows_reference, best_of_splits

FP8 = torch.float8_e4m3fn
FP8_LARGEST: tl.constexpr = tl.constexpr(448.0)
QUANTIZED_AT_ONCE = 8192  # tokens of the vocabulary, whose weights stand beside the copy in fp32

# (most rows, tiles), the last for any number; block_n are tokens of the vocabulary. The fastest on an H200 of
# `scripts/bench_kernels.py --tiles draft_head`, for 131,072 and 248,320 tokens: so small that several programs lie on a
# multiprocessor. Each reads its weights once, and all of x from the L2 cache.
_TILES = [
    (16, Tiles(16, 128, 256, 4, 3)),
    (32, Tiles(32, 128, 128, 4, 3)),
    (64, Tiles(64, 128, 128, 4, 3)),
    (0, Tiles(128, 128, 128, 4, 3)),
]


class DraftHead(NamedTuple):
    """weight [vocab, `padded_width` of hidden], fp8, contiguous, zeros behind hidden; scale [vocab], fp32.

    The weights of the head that it is a copy of are about weight * scale.
    """

    weight: torch.Tensor
    scale: torch.Tensor


def padded_width(hidden_size: int) -> int:
    """Values of a row that lies on words of the multiprocessors' copy engine."""
    return -(-hidden_size // WORD_BYTES) * WORD_BYTES


def draft_head_bytes(vocab_size: int, hidden_size: int) -> int:
    return vocab_size * (padded_width(hidden_size) * FP8.itemsize + torch.float32.itemsize)


def quantize_head(head_weight: torch.Tensor) -> DraftHead:
    """The copy of a head [hidden, vocab], as `kernels.linear` takes it. The largest weight of a token becomes 448."""
    hidden_size, vocab_size = head_weight.shape
    weight = head_weight.new_zeros(vocab_size, padded_width(hidden_size), dtype=FP8)
    scale = head_weight.new_empty(vocab_size, dtype=torch.float32)
    for first in range(0, vocab_size, QUANTIZED_AT_ONCE):
        at = slice(first, first + QUANTIZED_AT_ONCE)
        part = head_weight[:, at].t().float()
        scale[at] = (part.abs().amax(dim=1) / FP8_LARGEST.value).clamp_(min=torch.finfo(scale.dtype).tiny)
        weight[at, :hidden_size] = part / scale[at, None]
    return DraftHead(weight, scale)


def tiles_for(num_rows: int) -> Tiles:
    return next(tiles for most_rows, tiles in _TILES if num_rows <= most_rows or most_rows == 0)


@triton.jit
def scale_rows_kernel(
    p_x, p_out, K: tl.constexpr, OUT_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out = x / largest |x| of the row * 448, rounded to the dtype of out; NaN where x holds a NaN or an infinity.

    Grid: rows; a program owns one. Reads x [M, K], writes out [M, OUT_K], zeros behind K. fp32.
    """
    wait_for_inputs(PDL)
    i_row, o_k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    b_x = tl.load(p_x + i_row * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(b_x), axis=0)
    b_x = b_x / tl.where(largest == 0.0, 1.0, largest) * FP8_LARGEST
    tl.store(p_out + i_row * OUT_K + o_k, b_x.to(p_out.dtype.element_ty), mask=o_k < OUT_K)


@triton.jit(do_not_specialize=["num_rows", "V", "K"])
def draft_scores_kernel(
    p_x, p_weight, p_scale, p_value, p_index, num_rows, V, K,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """value, index[row, tile] = the largest of scale[v] * (weight[v] . x[row]) in a tile of v, and the lowest such v.

    Grid: tiles of the vocabulary times tiles of rows, those that share weights side by side. A program owns BLOCK_V
    tokens and BLOCK_M rows. p_x and p_weight are descriptors of [BLOCK_M, BLOCK_K] and [BLOCK_V, BLOCK_K], which read
    zeros past an end. Reads x, weight, scale; writes one value and one token. fp32; a NaN counts as inf, so that the
    value tells of it.
    """
    num_m, num_v = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(V, BLOCK_V)
    i_m, i_v = tl.program_id(0) % num_m, tl.program_id(0) // num_m
    first_m, first_v = i_m * BLOCK_M, i_v * BLOCK_V
    o_m, o_v = first_m + tl.arange(0, BLOCK_M), first_v + tl.arange(0, BLOCK_V)
    if PDL:
        gdc_wait()
    b_score = tl.zeros((BLOCK_V, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        b_weight, b_x = p_weight.load([first_v, k]), p_x.load([first_m, k])
        b_score = tl.dot(b_weight, b_x.T, b_score, input_precision="ieee")
    if PDL:
        gdc_launch_dependents()  # not earlier, for the reason that `linear_kernel` has
    b_score *= tl.load(p_scale + o_v, mask=o_v < V, other=0.0)[:, None]
    b_score = tl.where(b_score == b_score, b_score, float("inf"))
    b_score = tl.where((o_v < V)[:, None], b_score, float("-inf"))
    best = tl.max(b_score, axis=0)
    i_best = tl.min(tl.where(b_score == best[None, :], o_v[:, None], NO_ID), axis=0)
    o_tile = o_m.to(tl.int64) * num_v + i_v
    tl.store(p_value + o_tile, best, mask=o_m < num_rows)
    tl.store(p_index + o_tile, i_best, mask=o_m < num_rows)


def draft_tokens_reference(hidden: torch.Tensor, head: DraftHead) -> torch.Tensor:
    """Of each row of hidden [M, hidden], the token of the best score by `head`, the lowest of several; or NO_BEST where
    the row holds a NaN or an infinity. int64 [M].
    """
    x = pad(hidden.float(), (0, head.weight.shape[1] - hidden.shape[1]))
    largest = x.abs().amax(dim=1, keepdim=True)
    x = (x / torch.where(largest == 0, 1.0, largest) * FP8_LARGEST.value).to(head.weight.dtype)
    return argmax_rows_reference(x.float() @ head.weight.float().t() * head.scale)


def draft_tokens(hidden: torch.Tensor, head: DraftHead, out: torch.Tensor | None = None) -> torch.Tensor:
    """`draft_tokens_reference`, on a GPU in three launches without synchronisation.

    hidden: contiguous. out int64 [M], apart or not: where to write.
    """
    if runs_kernel(hidden):
        return draft_tokens_triton(hidden, head, out)
    tokens = draft_tokens_reference(hidden, head)
    return tokens if out is None else out.copy_(tokens)


def draft_tokens_triton(
    hidden: torch.Tensor, head: DraftHead, out: torch.Tensor | None = None, tiles: Tiles | None = None
) -> torch.Tensor:
    """The kernels behind `draft_tokens`. Raises ValueError for hidden states that are not contiguous, or do not fit."""
    (num_rows, hidden_size), (vocab_size, k) = hidden.shape, head.weight.shape
    if padded_width(hidden_size) != k or not hidden.is_contiguous():
        raise ValueError(
            f"draft_tokens takes contiguous hidden states as wide as the head: {tuple(hidden.shape)}, strides "
            f"{hidden.stride()}; the head is {tuple(head.weight.shape)}"
        )
    tiles = tiles or tiles_for(num_rows)
    num_tiles = triton.cdiv(vocab_size, tiles.block_n)
    value = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=hidden.device)
    index = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=hidden.device)
    if num_rows:
        x = torch.empty(num_rows, k, dtype=head.weight.dtype, device=hidden.device)
        block = triton.next_power_of_2(k)
        scale_rows_kernel[(num_rows,)](
            hidden, x, hidden_size, k, block, num_warps=min(8, max(1, block // 512)), **pdl(hidden.device)
        )
        draft_scores_kernel[(triton.cdiv(num_rows, tiles.block_m) * num_tiles,)](
            TensorDescriptor.from_tensor(x, [tiles.block_m, tiles.block_k]),
            TensorDescriptor.from_tensor(head.weight, [tiles.block_n, tiles.block_k]),
            head.scale,
            value,
            index,
            num_rows,
            vocab_size,
            k,
            BLOCK_M=tiles.block_m,
            BLOCK_V=tiles.block_n,
            BLOCK_K=tiles.block_k,
            **pdl(hidden.device),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return best_of_splits(value, index, out)
