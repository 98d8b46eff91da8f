"""Products of tokens with the experts they chose. A row's bits depend on that row and its expert's weight only.

Formula: y[p] = act(x[token of p] @ w[expert of p]) for each pair p of a token and an expert, in the order that
`sort_by_expert` gives them. K is added in its order from zero in fp32, whatever the tile; no sum crosses a program.
Grids come from upper bounds, so that a captured launch serves any choice of experts.
"""

import logging
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mambalign.kernels.activation import ACTIVATIONS, silu, silu_of
from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.expert_routing import sort_by_expert_on_gpu
from mambalign.kernels.linear import hard_inputs, linear

logger = logging.getLogger(__name__)

MAX_ROWS_TRIED = 512
GROUP_M = 8  # row tiles that run beside each other, so that they share rows and weights in the L2 cache


class Tiles(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By dtype width and whether gated: (most rows an expert has on average, tiles), the last for any number. Those of two
# bytes are the fastest on an H200 of `scripts/bench_experts.py --tiles`.
_TILES = {
    (2, False): [
        (12, Tiles(16, 128, 64, 8, 4)),
        (32, Tiles(32, 256, 64, 8, 3)),
        (64, Tiles(64, 256, 64, 8, 3)),
        (0, Tiles(128, 256, 64, 8, 3)),
    ],
    (2, True): [
        (12, Tiles(16, 128, 64, 8, 4)),
        (24, Tiles(32, 128, 64, 4, 4)),
        (128, Tiles(64, 256, 64, 8, 3)),
        (0, Tiles(128, 128, 64, 8, 4)),
    ],
    (4, False): [(16, Tiles(16, 64, 32, 4, 2)), (0, Tiles(64, 64, 32, 4, 2))],
}
_TILES[4, True] = _TILES[4, False]
_one_family: set[tuple[int, int, torch.dtype]] = set()  # [K, N] that the start-up check found wanting
_proven: set[tuple[int, int, torch.dtype, bool]] = set()  # and whether it is gated


def tiles_for(num_pairs: int, num_experts: int, k: int, n: int, dtype: torch.dtype, gated: bool) -> Tiles:
    """Tiles for that many pairs of tokens and experts, of a product with K = k and n columns."""
    rows = -(-num_pairs // num_experts)
    if (k, n, dtype) in _one_family:
        rows = max(rows, 64)
    tiles = next(tiles for most, tiles in _TILES[dtype.itemsize, gated] if rows <= most or most == 0)
    return tiles._replace(block_n=min(tiles.block_n, max(16, triton.next_power_of_2(n))))


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_linear_kernel(
    p_x,
    p_weight,
    p_order,
    p_first,
    p_out,
    num_tiles,
    E: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    FROM_TOKENS: tl.constexpr,
    RELU2: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row] = act(x[row] @ w[expert]) for each expert's rows in p_order; a gated one: silu(x @ gate) * (x @ up).

    Grid: tiles of rows of one expert (an upper bound: those past the last have none) times tiles of N columns.
    A program owns a [BLOCK_M, BLOCK_N] tile of out. FROM_TOKENS: x has a row for each token, out one for each place
    in p_order; else x has those and out a row for each pair. Reads x, w [E, K, N] ([E, K, 2 N], gate first, when
    gated); writes out (its dtype is the pointer's); rounds where separate steps would. fp32.
    """
    wait_for_inputs(PDL)
    GROUP: tl.constexpr = GROUP_M * ((N + BLOCK_N - 1) // BLOCK_N)
    first_tile, i_group = tl.program_id(0) // GROUP * GROUP_M, tl.program_id(0) % GROUP
    group_tiles = tl.minimum(num_tiles - first_tile, GROUP_M)
    i_tile, i_n, o_e = first_tile + i_group % group_tiles, i_group // group_tiles, tl.arange(0, BLOCK_E)
    b_begin = tl.load(p_first + o_e, mask=o_e < E, other=0)
    b_tiles = tl.cdiv(tl.load(p_first + o_e + 1, mask=o_e < E, other=0) - b_begin, BLOCK_M)
    b_past = tl.cumsum(b_tiles, axis=0) <= i_tile  # experts whose last tile lies before this one
    i_e = tl.sum((b_past & (o_e < E)).to(tl.int32), axis=0)
    if i_e < E:
        first = tl.load(p_first + i_e) + (i_tile - tl.sum(tl.where(o_e < i_e, b_tiles, 0), axis=0)) * BLOCK_M
        o_row = first + tl.arange(0, BLOCK_M)
        is_row = o_row < tl.load(p_first + i_e + 1)
        b_pair = tl.load(p_order + o_row, mask=is_row, other=0)  # rows past the end: some row, not stored
        if FROM_TOKENS:
            o_x, o_out = b_pair // TOP_K, o_row
        else:
            o_x, o_out = tl.where(is_row, o_row, 0), b_pair
        WIDTH: tl.constexpr = 2 * N if GATED else N
        EVEN: tl.constexpr = K % BLOCK_K == 0 and N % BLOCK_N == 0
        o_n, o_k = i_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        is_n = (o_n < N)[None, :]
        p_row = p_x + o_x.to(tl.int64)[:, None] * K + o_k[None, :]
        p_tile = p_weight + i_e.to(tl.int64) * (K * WIDTH) + o_k.to(tl.int64)[:, None] * WIDTH + o_n[None, :]
        b_sum, b_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            is_k = k + o_k < K
            b_x = _load(p_row, is_k[None, :], K % BLOCK_K == 0)
            is_weight = is_k[:, None] & is_n
            b_sum = tl.dot(b_x, _load(p_tile, is_weight, EVEN), b_sum, input_precision="ieee")
            if GATED:
                b_up = tl.dot(b_x, _load(p_tile + N, is_weight, EVEN), b_up, input_precision="ieee")
            p_row += BLOCK_K
            p_tile += BLOCK_K * WIDTH
        dtype: tl.constexpr = p_out.dtype.element_ty
        b_out = b_sum.to(dtype)
        if RELU2:
            positive = tl.where(b_out.to(tl.float32) < 0.0, 0.0, b_out.to(tl.float32))
            b_out = (positive * positive).to(dtype)
        if GATED:
            b_gate = silu_of(b_out.to(tl.float32)).to(dtype).to(tl.float32)
            b_out = (b_gate * b_up.to(dtype).to(tl.float32)).to(dtype)
        tl.store(p_out + o_out.to(tl.int64)[:, None] * N + o_n[None, :], b_out, mask=is_row[:, None] & is_n)


@triton.jit
def _load(p_tile, is_inside, EVEN: tl.constexpr):
    """A tile, with zeros outside. EVEN: nothing is outside, so that no mask narrows the loads."""
    return tl.load(p_tile) if EVEN else tl.load(p_tile, mask=is_inside, other=0.0)


def grouped_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    first: torch.Tensor,
    top_k: int,
    from_tokens: bool,
    activation: str | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Each expert's rows through its weight, expert by expert.

    weight [E, K, N], of the dtype of x, contiguous; [E, K, 2 N], gate then up, when `gated` (then silu(gate) * up is
    the activation). order int32 [P], first int32 [E + 1]: of `sort_by_expert`. from_tokens: x [T, K], and row j of
    the result [P, N] is that of pair order[j]; else x is such a result, and row p is that of pair p.
    activation: "relu2", "silu" or None.
    """
    width = weight.shape[2] // 2 if gated else weight.shape[2]
    out = x.new_empty(len(order), width)
    begins = first.tolist()
    for expert, (begin, end) in enumerate(pairwise(begins)):
        if begin == end:
            continue
        pairs = order[begin:end].long()
        y = linear(x[pairs // top_k] if from_tokens else x[begin:end], weight[expert], activation=activation)
        if gated:
            y = silu(y[:, :width]).mul_(y[:, width:])
        if from_tokens:
            out[begin:end] = y
        else:
            out[pairs] = y
    return out


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    first: torch.Tensor,
    top_k: int,
    from_tokens: bool,
    activation: str | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """`grouped_linear_reference`; on a GPU in one launch without synchronisation."""
    function = grouped_linear_on_gpu if x.is_cuda else grouped_linear_reference
    return function(x, weight, order, first, top_k, from_tokens, activation, gated)


def grouped_linear_on_gpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor,
    first: torch.Tensor,
    top_k: int,
    from_tokens: bool,
    activation: str | None = None,
    gated: bool = False,
    tiles: Tiles | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The kernel behind `grouped_linear`. Raises ValueError for a weight or an activation that it does not take."""
    num_experts, k, n = weight.shape
    n, num_pairs = n // 2 if gated else n, len(order)
    if not weight.is_contiguous() or weight.dtype != x.dtype or x.shape[1] != k:
        raise ValueError(f"grouped linear: weight {weight.shape} {weight.dtype}, {weight.stride()}; x {x.shape}")
    out = x.new_empty(num_pairs, n, dtype=out_dtype)
    if num_pairs == 0:
        return out
    tiles = tiles or tiles_for(num_pairs, num_experts, k, n, x.dtype, gated)
    num_tiles = min(num_experts, num_pairs) + num_pairs // tiles.block_m
    grouped_linear_kernel[(num_tiles * triton.cdiv(n, tiles.block_n),)](
        x.contiguous(), weight, order, first, out, num_tiles,
        E=num_experts, K=k, N=n, TOP_K=top_k, FROM_TOKENS=from_tokens, RELU2=activation == "relu2", GATED=gated,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k, GROUP_M=GROUP_M, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **pdl(x.device),
    )  # fmt: skip
    return out if activation in (None, "relu2") else ACTIVATIONS[activation](out)


def check_grouped_linear(weight: torch.Tensor, gated: bool = False) -> bool:
    """On a GPU, before the first capture: prove that no tile shows in the bits of a weight of this shape.

    weight: [E, K, N]. Inputs are those of `check_linear_invariance`. A shape that fails uses tiles of at least 64 rows
    from then on. Returns whether it failed. Raises RuntimeError when that does not help either.
    """
    _, k, n = weight.shape
    shape = (k, n // 2 if gated else n, weight.dtype)
    if weight.is_cuda and (*shape, gated) not in _proven:
        if not _is_invariant(*shape, gated, weight.device):
            _one_family.add(shape)
            if not _is_invariant(*shape, gated, weight.device):
                raise RuntimeError(f"experts of {k}x{n}, {weight.dtype}: their bits depend on the batch")
            logger.warning("experts of %dx%d %s: their bits depend on the batch; one family of tiles", *shape)
        _proven.add((*shape, gated))
    return shape in _one_family


def _is_invariant(k: int, n: int, dtype: torch.dtype, gated: bool, device: torch.device) -> bool:
    """One expert with few columns of the weight, whole and in pieces, the results before they are rounded."""
    columns = min(n, 512 + n % 512)
    x, weight = hard_inputs(MAX_ROWS_TRIED, k, 2 * columns if gated else columns, device)
    x, weight = x.to(dtype), weight.to(dtype)[None]

    def run(rows: torch.Tensor) -> torch.Tensor:
        order, first = sort_by_expert_on_gpu(torch.zeros(len(rows), 1, dtype=torch.int32, device=device), 1)
        tiles, fp32 = tiles_for(len(rows), 1, k, n, dtype, gated), torch.float32
        return grouped_linear_on_gpu(rows, weight, order, first, 1, True, gated=gated, tiles=tiles, out_dtype=fp32)

    want = run(x)
    for count in (1, 7, 16, 17, 64, 65, 128, 200):
        for start in (0, 1, MAX_ROWS_TRIED - count):
            if not torch.equal(run(x[start : start + count]), want[start : start + count]):
                return False
    return True
