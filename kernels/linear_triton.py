"""The linear layer of a GPU: one order of addition for a weight shape, whatever the number of rows.

Formula: y = x @ w (+ b), then relu2 if asked, w K-major. K is cut into `segments_of(K, N)` segments; each is walked in
order from an accumulator of zero, and their sums are added in order. Tiles, and whether segments run one after another
in a program or side by side in several, follow the number of rows (`tiles_for`) and do not show in the bits: a tensor
core adds the products of sixteen neighbouring k to its accumulator whatever the tile. `check_linear_invariance` in
`kernels/linear.py` proves that on the machine at hand.
"""

import os
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mambalign.kernels.dependent_launch import LINE_BYTES, pdl, prefetch_lines, wait_for_inputs

WIDE = 16384  # columns from which one segment gives enough programs to read a weight at full speed
LONG = 2048  # shorter K is one segment
NUM_SEGMENTS = 4
SEGMENT_MULTIPLE: tl.constexpr = tl.constexpr(256)  # a multiple of every BLOCK_K
GROUP_M = 8  # row tiles that run beside each other, so that they share weight tiles in the L2 cache
MAX_TILES = 8192  # of a launch whose segments run side by side: one counter each
WORD_BYTES = 16  # widest load of a thread
AHEAD_ROWS = int(os.environ.get("MAMBALIGN_LINEAR_AHEAD", "512"))  # of a weight, asked for before x is there
USE_TMA = os.environ.get("MAMBALIGN_LINEAR_TMA", "1") == "1"  # its ablation: threads fetch every tile


class Tiles(NamedTuple):
    """How a launch is cut. `split`: segments run side by side, and the last to arrive adds them. `tma`: tiles are
    fetched by the copy engine of the multiprocessor, where K and rows fit it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split: bool = False
    tma: bool = False


# By dtype width and kind of weight (one segment, or several): (most rows, tiles), the last for any number. Those of two
# bytes are the fastest of `scripts/bench_kernels.py --tiles` on an H200 over the weights of an 8B model.
_TILES: dict[tuple[int, bool], list[tuple[int, Tiles]]] = {
    (2, False): [
        (16, Tiles(16, 64, 128, 4, 4, tma=True)),
        (32, Tiles(32, 128, 64, 4, 5, tma=True)),
        (64, Tiles(64, 256, 64, 8, 4)),
        (128, Tiles(128, 256, 64, 8, 4, tma=True)),
        (256, Tiles(128, 128, 64, 4, 3, tma=True)),
        (512, Tiles(128, 128, 64, 8, 4)),
        (0, Tiles(128, 256, 64, 8, 4, tma=True)),
    ],
    (2, True): [
        (16, Tiles(16, 64, 128, 4, 4, True, tma=True)),
        (32, Tiles(32, 128, 64, 4, 5, True, tma=True)),
        (64, Tiles(64, 64, 64, 4, 5, True, tma=True)),
        (128, Tiles(128, 128, 64, 8, 4, True)),
        (256, Tiles(128, 128, 64, 8, 3, True)),
        (512, Tiles(64, 128, 64, 4, 4, tma=True)),
        (0, Tiles(128, 256, 64, 8, 3, tma=True)),
    ],
    (4, False): [(16, Tiles(16, 64, 32, 4, 2)), (0, Tiles(64, 64, 32, 4, 2))],
    (4, True): [(16, Tiles(16, 64, 32, 4, 2, True)), (64, Tiles(64, 64, 32, 4, 2, True)), (0, Tiles(64, 64, 32, 4, 2))],
}


def segments_of(k: int, n: int) -> tuple[int, int]:
    """Number of segments and their length for a weight [k, n]: part of the order of addition, so of nothing else."""
    if n >= WIDE or k < LONG:
        return 1, k
    length = -(-k // (NUM_SEGMENTS * SEGMENT_MULTIPLE.value)) * SEGMENT_MULTIPLE.value
    return -(-k // length), length


def tiles_for(num_rows: int, k: int, n: int, dtype: torch.dtype, one_family: bool = False) -> Tiles:
    """Tiles for that many rows. `one_family`: at least 64 rows a tile, so that one kind of instruction serves all."""
    rows = max(num_rows, 64) if one_family else num_rows
    table = _TILES[dtype.itemsize, segments_of(k, n)[0] > 1]
    tiles = next(tiles for most_rows, tiles in table if rows <= most_rows or most_rows == 0)
    return tiles._replace(block_n=min(tiles.block_n, max(16, triton.next_power_of_2(n))))


@triton.jit(do_not_specialize=["num_rows", "K", "N", "x_stride", "segment_k"])
def linear_kernel(
    p_x,
    p_weight,
    p_ahead,
    p_bias,
    p_out,
    p_partial,
    p_counter,
    num_rows,
    K,
    N,
    x_stride,
    segment_k,
    SEGMENTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    X_WORD: tl.constexpr,
    W_WORD: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    STREAM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RELU2: tl.constexpr,
    TMA: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = act(x @ w + b): sums of a segment from zero in fp32, segment sums added in order, then one rounding.

    Grid: tiles, grouped for the L2 cache, times segments if they run side by side (SPLIT).
    A program owns a [BLOCK_M, BLOCK_N] tile of out, or one segment's sums of it, which it leaves in p_partial
    [SEGMENTS, tiles, BLOCK_M, BLOCK_N] fp32; the program that a tile's counter says is its last adds them up and
    clears the counter. No sum depends on who that is. X_WORD, W_WORD divide the row strides of x and w. With TMA, p_x
    and p_weight are descriptors of [BLOCK_M, BLOCK_K] and [BLOCK_K, BLOCK_N]. The first AHEAD rows of a program's
    weight (p_ahead) are asked for before the wait for x.
    Reads x, w, b; writes out (its dtype is the pointer's); bias and activation round where separate steps would.
    """
    num_m, num_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    i_program = tl.program_id(0)
    i_segment = 0
    if SPLIT:
        i_segment = i_program // (num_m * num_n)
        i_program = i_program % (num_m * num_n)
    first_m = i_program // (GROUP_M * num_n) * GROUP_M
    group_m = tl.minimum(num_m - first_m, GROUP_M)
    i_m = first_m + i_program % (GROUP_M * num_n) % group_m
    i_n = i_program % (GROUP_M * num_n) // group_m

    if SEGMENTS > 1:
        segment_k = segment_k // SEGMENT_MULTIPLE * SEGMENT_MULTIPLE  # says what divides it
    x_stride, w_stride = x_stride // X_WORD * X_WORD, N // W_WORD * W_WORD
    first_m, first_n = i_m * BLOCK_M, i_n * BLOCK_N
    o_n = first_n + tl.arange(0, BLOCK_N)
    if PDL and AHEAD > 0:
        LINE: tl.constexpr = LINE_BYTES // (p_ahead.dtype.element_ty.primitive_bitwidth // 8)
        LINES: tl.constexpr = (BLOCK_N + LINE - 1) // LINE
        o_ahead = tl.minimum(i_segment * segment_k + tl.arange(0, AHEAD), K - 1).to(tl.int64)
        o_line = tl.minimum(first_n + tl.arange(0, LINES) * LINE, w_stride - 1)
        prefetch_lines(p_ahead + o_ahead[:, None] * w_stride + o_line[None, :])
    wait_for_inputs(PDL)
    if not TMA:
        o_m = tl.minimum(first_m + tl.arange(0, BLOCK_M), num_rows - 1)  # rows past the end: the last, not stored
        o_k = tl.arange(0, BLOCK_K)
        p_x += o_m.to(tl.int64)[:, None] * x_stride + o_k[None, :]
        p_weight += o_k.to(tl.int64)[:, None] * w_stride + o_n[None, :]
    if SPLIT or SEGMENTS == 1:
        total = _segment_sum(
            p_x, p_weight, first_m, first_n, i_segment * segment_k, segment_k, K, w_stride, o_n < w_stride,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, EVEN_N, STREAM, TMA,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in tl.range(0, SEGMENTS, num_stages=1):
            total += _segment_sum(
                p_x, p_weight, first_m, first_n, i * segment_k, segment_k, K, w_stride, o_n < w_stride,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, EVEN_N, STREAM, TMA,
            )  # fmt: skip
    if SPLIT:
        o_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        p_partial += i_program.to(tl.int64) * (BLOCK_M * BLOCK_N) + o_tile
        next_segment = (num_m * num_n).to(tl.int64) * (BLOCK_M * BLOCK_N)
        tl.store(p_partial + i_segment * next_segment, total)
        tl.debug_barrier()  # every thread's sums are there before one of them says so
        if tl.atomic_add(p_counter + i_program, 1, sem="acq_rel") == SEGMENTS - 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for i in range(0, SEGMENTS):
                total += tl.load(p_partial + i * next_segment, cache_modifier=".cg")
            _store_tile(p_out, p_bias, total, i_m, o_n, num_rows, w_stride, BLOCK_M, EVEN_N, HAS_BIAS, RELU2)
            tl.store(p_counter + i_program, 0)
    else:
        _store_tile(p_out, p_bias, total, i_m, o_n, num_rows, w_stride, BLOCK_M, EVEN_N, HAS_BIAS, RELU2)


@triton.jit
def _segment_sum(
    p_x, p_weight, first_m, first_n, first_k, segment_k, K, w_stride, is_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, STREAM: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The products of one segment, from zero, in the order of k. STREAM: no other program reads these weights."""
    o_k = tl.arange(0, BLOCK_K)
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    num_k = tl.minimum(segment_k, K - first_k)
    if not TMA:
        p_x += first_k
        p_weight += tl.cast(first_k, tl.int64) * w_stride
    policy: tl.constexpr = "evict_first" if STREAM else ""
    for k in range(0, num_k, BLOCK_K):
        if TMA:
            b_x, b_weight = p_x.load([first_m, first_k + k]), p_weight.load([first_k + k, first_n])
        else:
            is_k = k + o_k < num_k
            if EVEN_K:
                b_x = tl.load(p_x)
            else:
                b_x = tl.load(p_x, mask=is_k[None, :], other=0.0)
            if EVEN_K and EVEN_N:
                b_weight = tl.load(p_weight, eviction_policy=policy)
            elif EVEN_K:
                b_weight = tl.load(p_weight, mask=is_column[None, :], other=0.0, eviction_policy=policy)
            else:
                is_weight = is_k[:, None] & is_column[None, :]
                b_weight = tl.load(p_weight, mask=is_weight, other=0.0, eviction_policy=policy)
            p_x += BLOCK_K
            p_weight += BLOCK_K * tl.cast(w_stride, tl.int64)
        b_sum = tl.dot(b_x, b_weight, b_sum, input_precision="ieee")
    return b_sum


@triton.jit
def _store_tile(
    p_out, p_bias, total, i_m, o_n, num_rows, N,
    BLOCK_M: tl.constexpr, EVEN_N: tl.constexpr, HAS_BIAS: tl.constexpr, RELU2: tl.constexpr,
):  # fmt: skip
    """Round, add the bias and round, square what is positive and round, as three steps over tensors would."""
    dtype: tl.constexpr = p_out.dtype.element_ty
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    is_out = (o_m < num_rows)[:, None]
    if not EVEN_N:
        is_out = is_out & (o_n < N)[None, :]
    b_out = total.to(dtype)
    if HAS_BIAS:
        b_bias = tl.load(p_bias + o_n, mask=o_n < N, other=0.0)
        b_out = (b_out.to(tl.float32) + b_bias.to(tl.float32)[None, :]).to(dtype)
    if RELU2:
        positive = tl.where(b_out.to(tl.float32) < 0.0, 0.0, b_out.to(tl.float32))
        b_out = (positive * positive).to(dtype)
    tl.store(p_out + o_m.to(tl.int64)[:, None] * N + o_n[None, :], b_out, mask=is_out)


def linear_on_gpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    relu2: bool = False,
    out_dtype: torch.dtype | None = None,
    tiles: Tiles | None = None,
    segments: tuple[int, int] | None = None,
) -> torch.Tensor:
    """x [M, K] (rows may be apart) times weight [K, N] (contiguous) plus bias [N], in `out_dtype` or the dtype of x.

    `tiles` and `segments` are `tiles_for` and `segments_of` unless given. Raises ValueError for a weight that is not
    contiguous or not on a 16-byte boundary.
    """
    num_rows, k = x.shape
    n = weight.shape[1]
    if not weight.is_contiguous() or weight.data_ptr() % WORD_BYTES:
        raise ValueError(f"a linear weight must be contiguous and aligned to {WORD_BYTES} bytes: {weight.stride()}")
    out = x.new_empty(num_rows, n, dtype=out_dtype)
    if num_rows == 0:
        return out
    if x.stride(1) != 1 or x.data_ptr() % WORD_BYTES:
        x = x.clone(memory_format=torch.contiguous_format)
    tiles = tiles or tiles_for(num_rows, k, n, x.dtype)
    num_segments, segment_k = segments or segments_of(k, n)
    num_tiles = -(-num_rows // tiles.block_m) * -(-n // tiles.block_n)
    split = tiles.split and num_segments > 1
    partial = counters = out
    if split:
        counters = tile_counters(x.device)
        assert num_tiles <= MAX_TILES, f"{num_tiles} tiles side by side"
        sums = num_segments * num_tiles * tiles.block_m * tiles.block_n
        partial = torch.empty(sums, dtype=torch.float32, device=x.device)
    word = WORD_BYTES // x.element_size()
    even_k = k % segment_k == 0 and segment_k % tiles.block_k == 0
    tma = USE_TMA and tiles.tma and even_k and x.stride(0) % word == 0 and n % word == 0
    linear_kernel[(num_tiles * (num_segments if split else 1),)](
        TensorDescriptor.from_tensor(x, [tiles.block_m, tiles.block_k]) if tma else x,
        TensorDescriptor.from_tensor(weight, [tiles.block_k, tiles.block_n]) if tma else weight,
        weight,
        weight if bias is None else bias,
        out,
        partial,
        counters,
        num_rows,
        k,
        n,
        x.stride(0),
        segment_k,
        SEGMENTS=num_segments,
        SPLIT=split,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP_M=GROUP_M,
        X_WORD=word if x.stride(0) % word == 0 else 1,
        W_WORD=word if n % word == 0 else 1,
        EVEN_K=even_k,
        EVEN_N=n % tiles.block_n == 0,
        STREAM=num_rows <= tiles.block_m,
        HAS_BIAS=bias is not None,
        RELU2=relu2,
        TMA=tma,
        AHEAD=AHEAD_ROWS if num_rows <= tiles.block_m else 0,
        **pdl(x.device),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


@cache
def tile_counters(device: torch.device) -> torch.Tensor:
    """A device's counters, zeros between launches. Raises RuntimeError when first asked for while a graph is captured:
    the zeros would be written by its replays only."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("linear: run the start-up check before the first capture")
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
