"""The linear layer of a GPU: one order of addition for a weight shape, whatever the number of rows.

Formula: y = x @ w (+ b), then relu2 if asked, w K-major. K is cut into `segments_of(K, N)` segments; each is walked in
order from an accumulator of zero, and their sums are added in order. Tiles, and whether segments run one after another
in a program or side by side in several, follow the number of rows (`tiles_for`) and do not show in the bits: a tensor
core adds the products of sixteen neighbouring k to its accumulator whatever the tile. `check_linear_invariance` in
`kernels/linear.py` proves that on the machine at hand.

Segments side by side leave their sums, [segments, M, N] in fp32, to whoever reads them: `merge_segments`, or the norm
that follows (`kernels/rms_norm.py`).
"""

import os

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mambalign.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, pdl, wait_for_inputs
from mambalign.kernels.linear_tiles import SEGMENT_MULTIPLE, Tiles, segments_of, tiles_for

_SEGMENT_MULTIPLE = tl.constexpr(SEGMENT_MULTIPLE)
GROUP_M = 8  # row tiles that run beside each other, so that they share weight tiles in the L2 cache
WORD_BYTES = 16  # widest load of a thread
MERGE_BLOCK = 1024  # columns of a program that adds segments
USE_TMA = os.environ.get("MAMBALIGN_LINEAR_TMA", "1") == "1"  # its ablation: threads fetch every tile


@triton.jit(do_not_specialize=["num_rows", "K", "N", "x_stride", "segment_k"])
def linear_kernel(
    p_x,
    p_weight,
    p_bias,
    p_out,
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
    PDL: tl.constexpr,
):
    """out = act(x @ w + b): sums of a segment from zero in fp32, segment sums added in order, then one rounding.

    Grid: tiles, grouped for the L2 cache, times segments if they run side by side (SPLIT).
    A program owns a [BLOCK_M, BLOCK_N] tile of out; with SPLIT of one segment's sums, in out [SEGMENTS, M, N] fp32, and
    without bias and activation. X_WORD, W_WORD divide the row strides of x and w. With TMA, p_x and p_weight are
    descriptors of [BLOCK_M, BLOCK_K] and [BLOCK_K, BLOCK_N].
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
        segment_k = segment_k // _SEGMENT_MULTIPLE * _SEGMENT_MULTIPLE  # says what divides it
    x_stride, w_stride = x_stride // X_WORD * X_WORD, N // W_WORD * W_WORD
    first_m, first_n = i_m * BLOCK_M, i_n * BLOCK_N
    o_n = first_n + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_wait()
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
    if PDL:
        gdc_launch_dependents()  # not earlier: programs of the next kernel would crowd on some multiprocessors
    if SPLIT:
        p_out += i_segment.to(tl.int64) * num_rows * w_stride
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


@triton.jit(do_not_specialize=["N", "segment_stride"])
def merge_segments_kernel(
    p_sums, p_bias, p_out, N, segment_stride,
    SEGMENTS: tl.constexpr, WORD: tl.constexpr, HAS_BIAS: tl.constexpr, RELU2: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out = act(sum of the segments in order, rounded (+ b)), rounded where `linear_kernel` rounds.

    Grid (rows, tiles of BLOCK columns). A program owns a tile of a row. Reads sums, b; writes out. fp32. WORD divides N
    and segment_stride.
    """
    wait_for_inputs(PDL)
    N, segment_stride = N // WORD * WORD, segment_stride // WORD * WORD
    i_row, o_n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p_sums += i_row.to(tl.int64) * N + o_n
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SEGMENTS):
        b_sum += tl.load(p_sums + i * segment_stride, mask=o_n < N, other=0.0)
    _store_tile(p_out, p_bias, b_sum[None, :], i_row, o_n, i_row + 1, N, 1, False, HAS_BIAS, RELU2)


def merge_segments(
    sums: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, relu2: bool = False
) -> torch.Tensor:
    """Sums [S, M, N] fp32 (rows contiguous), added in order, as [M, N] in `dtype`; plus bias [N], then relu2."""
    num_segments, num_rows, n = sums.shape
    out = sums.new_empty(num_rows, n, dtype=dtype)
    if num_rows:
        merge_segments_kernel[(num_rows, triton.cdiv(n, MERGE_BLOCK))](
            sums, out if bias is None else bias, out, n, sums.stride(0),
            SEGMENTS=num_segments, WORD=8 if n % 8 == 0 else 1, HAS_BIAS=bias is not None, RELU2=relu2,
            BLOCK=MERGE_BLOCK, **pdl(sums.device),
        )  # fmt: skip
    return out


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
    tiles = tiles or tiles_for(len(x), *weight.shape, x.dtype)
    segments = segments or segments_of(*weight.shape)
    if tiles.split and segments[0] > 1:
        return merge_segments(segment_sums(x, weight, tiles, segments), bias, out_dtype or x.dtype, relu2)
    out = x.new_empty(len(x), weight.shape[1], dtype=out_dtype)
    _launch(x, weight, bias, out, relu2, tiles, segments, split=False)
    return out


def segment_sums(
    x: torch.Tensor, weight: torch.Tensor, tiles: Tiles, segments: tuple[int, int] | None = None
) -> torch.Tensor:
    """The products of x and weight (as in `linear_on_gpu`) by segments of K: [segments, M, N], fp32."""
    segments = segments or segments_of(*weight.shape)
    out = x.new_empty(segments[0], len(x), weight.shape[1], dtype=torch.float32)
    _launch(x, weight, None, out, False, tiles, segments, split=True)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    relu2: bool,
    tiles: Tiles,
    segments: tuple[int, int],
    split: bool,
) -> None:
    (num_rows, k), n, (num_segments, segment_k) = x.shape, weight.shape[1], segments
    if not weight.is_contiguous() or weight.data_ptr() % WORD_BYTES:
        raise ValueError(f"a linear weight must be contiguous and aligned to {WORD_BYTES} bytes: {weight.stride()}")
    if num_rows == 0:
        return
    if x.stride(1) != 1 or x.data_ptr() % WORD_BYTES:
        x = x.clone(memory_format=torch.contiguous_format)
    num_tiles = -(-num_rows // tiles.block_m) * -(-n // tiles.block_n)
    word = WORD_BYTES // x.element_size()
    tma = USE_TMA and tiles.tma and x.stride(0) % word == 0 and n % word == 0  # gives zeros past the end of K
    linear_kernel[(num_tiles * (num_segments if split else 1),)](
        TensorDescriptor.from_tensor(x, [tiles.block_m, tiles.block_k]) if tma else x,
        TensorDescriptor.from_tensor(weight, [tiles.block_k, tiles.block_n]) if tma else weight,
        weight if bias is None else bias,
        out,
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
        EVEN_K=k % segment_k == 0 and segment_k % tiles.block_k == 0,
        EVEN_N=n % tiles.block_n == 0,
        STREAM=num_rows <= tiles.block_m,
        HAS_BIAS=bias is not None,
        RELU2=relu2,
        TMA=tma,
        **pdl(x.device),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
