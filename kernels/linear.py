"""Linear layers in which a row's bits depend on that row and the weight only, never on the rows beside it.

Formula: y = x @ w (+ b), with w stored K-major ([K, N], contiguous), as the loader lays it out.

A CPU matrix library picks another kernel, and so another order of addition, when the number of rows is small or
K is long. Three habits keep it to one order: the weight is K-major, K is walked in segments of `SEGMENT_K` that
are added in order, and a single row is run as two. That this suffices is a property of a machine and its library,
not a law: `check_linear_invariance` tries it at start-up on each weight shape, and a shape that fails is run in
blocks of `BLOCK_ROWS` rows from then on. The number of threads is part of the build: it must not change later.
"""

import logging
from collections.abc import Iterable

import torch

logger = logging.getLogger(__name__)

SEGMENT_K = 512
BLOCK_ROWS = 8
MAX_ROWS = 512  # most rows of one call to the library; more rows are run in pieces of this many

_run_by_blocks: set[tuple[int, int, torch.dtype]] = set()  # shapes that the start-up check found wanting


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] times weight [K, N] plus bias [N], in the dtype of x. Every row of the result is batch-invariant."""
    num_rows = x.shape[0]
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
    return out if bias is None else out.add_(bias)


def check_linear_invariance(weights: Iterable[torch.Tensor]) -> list[tuple[int, int, torch.dtype]]:
    """Prove `linear` batch-invariant for the shapes of these weights; run those that fail in fixed blocks of rows.

    Inputs have exponents spread over 2^-12 .. 2^12 and pairs that nearly cancel, so that a changed order of
    addition shows. Returns the shapes that failed. Raises RuntimeError when fixed blocks do not help either.
    """
    failed = []
    for k, n, dtype, device in dict.fromkeys((*w.shape, w.dtype, w.device) for w in weights):
        if _is_invariant(k, n, dtype, device):
            continue
        _run_by_blocks.add((k, n, dtype))
        failed.append((k, n, dtype))
        if not _is_invariant(k, n, dtype, device):
            raise RuntimeError(f"linear layer of shape {k}x{n}, {dtype}: no batch-invariant way to run it on {device}")
        logger.warning(
            "linear %dx%d %s: the library's bits depend on the batch; running it in blocks of %d rows",
            k,
            n,
            dtype,
            BLOCK_ROWS,
        )
    return failed


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
    generator = torch.Generator().manual_seed(k * 1_000_003 + n)

    def spread(rows: int, columns: int) -> torch.Tensor:
        exponents = torch.randint(-12, 13, (rows, columns), generator=generator)
        return torch.randn(rows, columns, generator=generator).ldexp(exponents)

    x, weight = spread(MAX_ROWS, k), spread(k, n)
    half = k // 2  # the second half nearly cancels the first
    x[:, half : 2 * half] = -x[:, :half] * (1 + 1e-3 * torch.rand(half, generator=generator))
    weight[half : 2 * half] = weight[:half]
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    want = linear(x, weight)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 31, 32, 33, 37, 48, 64, 65, 100, 128, 200, 256, 384):
        for first in {0, 1, 7, MAX_ROWS - num_rows}:
            if not torch.equal(linear(x[first : first + num_rows], weight), want[first : first + num_rows]):
                return False
    return True
