"""Linear layers in which a row's bits depend on that row and the weight only, never on the rows beside it.

Formula: y = act(x @ w (+ b)), with w stored K-major ([K, N], contiguous), as the loader lays it out.

A CPU matrix library picks another kernel, and so another order of addition, when the number of rows is small or
K is long. Three habits keep it to one order: the weight is K-major, K is walked in segments of `SEGMENT_K` that
are added in order, and a single row is run as two. That this suffices is a property of a machine and its library,
not a law: `check_linear_invariance` tries it at start-up on each weight shape, and a shape that fails is run in
blocks of `BLOCK_ROWS` rows from then on. It tries one thread and all of them: a step may use either.

A GPU runs the kernel of `kernels/linear_triton.py`, whose order of addition is fixed by the weight's shape; the check
tries that too, and a shape that fails uses one family of tiles for every number of rows. The check also finds the row
counts, of a short list, at which the GPU's library gives the kernel's bits, launched and captured; the library then
serves where many rows share a step: whole products of wide weights, those of each segment of the others.
"""

import logging
import os
from collections.abc import Callable, Iterable
from functools import partial

import torch

from mambalign.kernels.activation import ACTIVATIONS
from mambalign.kernels.linear_tiles import Tiles, segments_of, tiles_for
from mambalign.kernels.linear_triton import WORD_BYTES, linear_on_gpu, merge_segments, segment_sums
from mambalign.kernels.rms_norm import norm_adds_segments

logger = logging.getLogger(__name__)

SEGMENT_K = 512
BLOCK_ROWS = 8
ROWS_TRIED = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 31, 32, 33, 37, 48, 64, 65, 100, 128, 200, 256, 384)
MAX_ROWS = 512  # most rows of one call to the library; more rows are run in pieces of this many

LIBRARY_ROWS = (96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)  # row counts at which a GPU's library may serve
MOST_OWN_ROWS = 128  # of segments side by side, that the kernel adds up as fast as the library
MAX_SQUARED_ROWS = 256  # of the library; past them the kernel, which squares as it stores, is faster
MAX_LIBRARY_BYTES = 1 << 29  # of a result that the check computes three times
WIDEST_NORM = 8192  # no stream of hidden states is wider
USE_LIBRARY = os.environ.get("MAMBALIGN_LINEAR_LIBRARY", "1") == "1"  # its ablation: the kernel for every row count

Shape = tuple[int, int, torch.dtype]
_run_by_blocks: set[Shape] = set()  # shapes that the start-up check found wanting
# Row counts of the library that the check found equal to the kernel, by shape and by the dtype of the product.
_library_rows: dict[tuple[Shape, torch.dtype], set[int]] = {}
_merged_widths: set[tuple[int, torch.dtype]] = (
    set()
)  # whose norm, given segments, has other bits than given the product


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K] times weight [K, N] plus bias [N], then an activation of `ACTIVATIONS`. Every row is batch-invariant.

    x: rows may be apart. weight: contiguous, of the dtype of x. bias: of the dtype of x.
    out_dtype: None, the dtype of x; or fp32, which on a GPU is the sums themselves, on a CPU the rounded result.
    Returns [M, N], rounded after the product, the bias and the activation, as three steps would.
    """
    if x.is_cuda:
        return _linear_on_gpu(x, weight, bias, activation, out_dtype)
    x, num_rows = x.contiguous(), x.shape[0]  # a library may choose its kernel by how far apart rows are
    if _run_by_blocks and (*weight.shape, weight.dtype) in _run_by_blocks:
        out = _linear_by_blocks(x, weight)
    elif num_rows == 1:
        out = _linear_by_segments(x.repeat(2, 1), weight)[:1]
    elif num_rows <= MAX_ROWS:
        out = _linear_by_segments(x, weight)
    else:
        out = x.new_empty(num_rows, weight.shape[1])
        for start, stop in _pieces(num_rows):
            _linear_by_segments(x[start:stop], weight, out[start:stop])
    if bias is not None:
        out.add_(bias)
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out if out_dtype is None else out.to(out_dtype)


def linear_for_sum(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear`, for `add_rms_norm` to read: it may take over the sum of K's segments.

    Returns what `linear` does; or [segments, M, N] fp32, which added in order and rounded are that.
    """
    if x.is_cuda and bias is None and (weight.shape[1], x.dtype) not in _merged_widths:
        tiles = _tiles_for(x, weight)
        if tiles.split:
            return _segment_sums(x, weight, tiles)
    return linear(x, weight, bias)


def check_linear_invariance(
    weights: Iterable[torch.Tensor], in_fp32: Iterable[torch.Tensor] = ()
) -> list[tuple[int, int, torch.dtype]]:
    """Prove `linear` batch-invariant for the shapes of these weights; run those that fail in fixed blocks of rows.

    in_fp32: those among them whose products are asked for in fp32, as a model's logits are.
    Inputs have exponents spread over 2^-12 .. 2^12 and pairs that nearly cancel, so that a changed order of
    addition shows. Returns the shapes that failed. Raises RuntimeError when fixed blocks do not help either.
    On a GPU a shape that fails uses one family of tiles instead; call it before the first capture of a graph.
    """
    failed, norms = [], set()
    shapes_in_fp32 = {(*weight.shape, weight.dtype) for weight in in_fp32}
    for k, n, dtype, device in dict.fromkeys((*weight.shape, weight.dtype, weight.device) for weight in weights):
        is_invariant = _is_invariant_on_gpu if device.type == "cuda" else _is_invariant
        if not is_invariant(k, n, dtype, device):
            _run_by_blocks.add((k, n, dtype))
            failed.append((k, n, dtype))
            if not is_invariant(k, n, dtype, device):
                raise RuntimeError(f"linear layer {k}x{n}, {dtype}: no batch-invariant way to run it on {device}")
            instead = "one family of tiles" if device.type == "cuda" else f"blocks of {BLOCK_ROWS} rows"
            logger.warning("linear %dx%d %s: its bits depend on the batch; running it in %s", k, n, dtype, instead)
        if device.type == "cuda" and USE_LIBRARY:
            out_dtype = torch.float32 if (k, n, dtype) in shapes_in_fp32 else dtype
            equal = _library_rows[(k, n, dtype), out_dtype] = _equal_library_rows(k, n, dtype, out_dtype, device)
            logger.info("linear %dx%d %s: library at %s rows", k, n, dtype, sorted(equal))
        if device.type == "cuda" and segments_of(k, n)[0] > 1 and n <= WIDEST_NORM:
            norms.add((segments_of(k, n)[0], n, dtype, device))
    for num_segments, n, dtype, device in norms:
        if not norm_adds_segments(num_segments, n, dtype, device):
            _merged_widths.add((n, dtype))
            logger.warning("norm of %d %s: its bits depend on who adds segments; they are merged before", n, dtype)
    return failed


def _linear_on_gpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    relu2, tiles, library_rows = activation == "relu2", _tiles_for(x, weight), 0
    if not tiles.split and not (relu2 and len(x) > MAX_SQUARED_ROWS):
        library_rows = _library_row_count(x, weight, out_dtype or x.dtype)
    if library_rows:
        out = _library_product(_pad_rows(x, library_rows), weight, out_dtype or x.dtype)[: len(x)]
        out = out if bias is None else out.add_(bias)
        return out if activation is None else ACTIVATIONS[activation](out)
    if tiles.split:
        out = merge_segments(_segment_sums(x, weight, tiles), bias, out_dtype or x.dtype, relu2)
    else:
        out = linear_on_gpu(x, weight, bias, relu2=relu2, out_dtype=out_dtype, tiles=tiles)
    return out if activation is None or relu2 else ACTIVATIONS[activation](out)


def _tiles_for(x: torch.Tensor, weight: torch.Tensor) -> Tiles:
    shape = (*weight.shape, weight.dtype)
    return tiles_for(len(x), *shape, one_family=shape in _run_by_blocks)


def _segment_sums(x: torch.Tensor, weight: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """[segments, M, N] fp32, rows contiguous: of a product whose tiles run segments side by side."""
    library_rows = _library_row_count(x, weight, x.dtype)
    if not library_rows:
        return segment_sums(x, weight, tiles)
    return _library_sums(_pad_rows(x, library_rows), weight)[:, : len(x)]


def _library_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (num_segments, length), (num_rows, _) = segments_of(*weight.shape), x.shape
    by_segment = x.view(num_rows, num_segments, length).transpose(0, 1)
    return torch.bmm(by_segment, weight.view(num_segments, length, -1), out_dtype=torch.float32)


def _library_product(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return torch.mm(x, weight) if out_dtype == x.dtype else torch.mm(x, weight, out_dtype=out_dtype)


def _library_row_count(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> int:
    """The row count to pad x to, or 0: none of the equal ones is at most an eighth larger, or x lies otherwise in
    memory than what the check compared."""
    if not x.is_contiguous() or x.data_ptr() % WORD_BYTES:
        return 0
    counts, num_rows = _library_rows.get(((*weight.shape, weight.dtype), out_dtype), ()), len(x)
    return next((count for count in sorted(counts) if num_rows <= count and count - num_rows <= num_rows // 8), 0)


def _pad_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    if x.shape[0] == num_rows:
        return x
    padded = x.new_zeros(num_rows, x.shape[1])
    padded[: x.shape[0]] = x
    return padded


def _equal_library_rows(k: int, n: int, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device) -> set[int]:
    """Row counts at which the library gives the kernel's bits, over products that nearly cancel."""
    equal, (num_segments, length) = set(), segments_of(k, n)
    if dtype == torch.float32 or num_segments * length != k:
        return equal
    counts = [count for count in LIBRARY_ROWS if count * n * out_dtype.itemsize <= MAX_LIBRARY_BYTES]
    if num_segments > 1:
        counts = [count for count in counts if count > MOST_OWN_ROWS and tiles_for(count, k, n, dtype).split]
    if not counts:
        return equal
    x, weight = (each.to(dtype) for each in hard_inputs(max(counts), k, n, device))
    for count in counts:
        rows = x[:count]
        if num_segments > 1:
            run, want = partial(_library_sums, rows, weight), segment_sums(rows, weight, tiles_for(count, k, n, dtype))
        else:
            run, want = (
                partial(_library_product, rows, weight, out_dtype),
                linear_on_gpu(rows, weight, out_dtype=out_dtype),
            )
        if torch.equal(run(), want) and torch.equal(_replayed(run), want):
            equal.add(count)
    return equal


def _replayed(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a captured launch gives."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    return out.clone()


def _linear_by_segments(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    if weight.shape[0] <= SEGMENT_K or x.dtype != torch.float32:
        return torch.mm(x, weight, out=out)
    out = torch.mm(x[:, :SEGMENT_K], weight[:SEGMENT_K], out=out)
    for start in range(SEGMENT_K, weight.shape[0], SEGMENT_K):
        out += torch.mm(x[:, start : start + SEGMENT_K], weight[start : start + SEGMENT_K])
    return out


def _linear_by_blocks(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    num_rows = x.shape[0]
    num_blocks = -(-num_rows // BLOCK_ROWS)
    padded = x.new_zeros(num_blocks * BLOCK_ROWS, x.shape[1])
    padded[:num_rows] = x
    out = x.new_empty(num_blocks * BLOCK_ROWS, weight.shape[1])
    for block in range(0, padded.shape[0], BLOCK_ROWS):
        torch.mm(padded[block : block + BLOCK_ROWS], weight, out=out[block : block + BLOCK_ROWS])
    return out[:num_rows]


def _pieces(num_rows: int) -> list[tuple[int, int]]:
    """[start, stop) of at most `MAX_ROWS` rows each; none holds a single row."""
    starts = list(range(0, num_rows, MAX_ROWS))
    if num_rows - starts[-1] == 1:
        starts[-1] -= 1
    return list(zip(starts, [*starts[1:], num_rows], strict=True))


def _is_invariant(k: int, n: int, dtype: torch.dtype, device: torch.device) -> bool:
    x, weight = hard_inputs(MAX_ROWS, k, n, device)
    x, weight = x.to(dtype), weight.to(dtype)
    want = linear(x, weight)
    most = torch.get_num_threads()
    try:
        for num_threads in {1, most}:
            torch.set_num_threads(num_threads)
            for num_rows in ROWS_TRIED:
                for first in {0, 1, 7, MAX_ROWS - num_rows}:
                    if not torch.equal(linear(x[first : first + num_rows], weight), want[first : first + num_rows]):
                        return False
    finally:
        torch.set_num_threads(most)
    return True


def _is_invariant_on_gpu(k: int, n: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Compares the sums before they are rounded, in tiles and segments of the whole weight but fewer columns."""
    num_columns, num_rows = n if n < 1024 else 512 + n % 512, 1024
    one_family, segments = (k, n, dtype) in _run_by_blocks, segments_of(k, n)
    x, weight = hard_inputs(num_rows, k, num_columns, device)
    x, weight = x.to(dtype), weight.to(dtype)

    def run(rows: torch.Tensor) -> torch.Tensor:
        tiles = tiles_for(len(rows), k, n, dtype, one_family)
        return linear_on_gpu(rows, weight, out_dtype=torch.float32, tiles=tiles, segments=segments)

    want = run(x)
    for count in (1, 7, 16, 17, 32, 48, 64, 100, 128, 200, 256, 500):
        for first in {0, 1, num_rows - count}:
            if not torch.equal(run(x[first : first + count]), want[first : first + count]):
                return False
    return True


def hard_inputs(num_rows: int, k: int, n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_rows, k] and a weight [k, n], fp32, whose products spread widely; the second half of K nearly cancels."""
    seed, half = 2 * (k * 1_000_003 + n), k // 2
    x, weight = _hard_values(num_rows, k, seed, device), _hard_values(k, n, seed + 1, device)
    noise = torch.rand(half, generator=torch.Generator(device).manual_seed(0), device=device)
    x[:, half : 2 * half] = -x[:, :half] * (1 + 1e-3 * noise)
    weight[half : 2 * half] = weight[:half]
    return x, weight


def _hard_values(rows: int, columns: int, seed: int, device: torch.device) -> torch.Tensor:
    """Normal values times powers of two from 2^-12 to 2^12."""
    generator = torch.Generator(device).manual_seed(seed)
    exponents = torch.randint(-12, 13, (rows, columns), generator=generator, device=device, dtype=torch.int32)
    return torch.randn(rows, columns, generator=generator, device=device).ldexp_(exponents)
