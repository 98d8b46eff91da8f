"""How a linear layer of a GPU is cut: K into segments, which are part of its order of addition, and a launch into
tiles, which are not (`kernels/linear_triton.py` says why).
"""

from typing import NamedTuple

import torch
import triton

WIDE = 8192  # columns from which one segment gives enough programs to read a weight at full speed
LONG = 2048  # shorter K is one segment
NUM_SEGMENTS = 4
SEGMENT_MULTIPLE = 256  # a multiple of every BLOCK_K


class Tiles(NamedTuple):
    """How a launch is cut. `split`: segments run side by side, and leave their sums. `tma`: tiles are fetched by the
    copy engine of the multiprocessor, where rows begin on its boundaries."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split: bool = False
    tma: bool = False


FEW_COLUMNS = 16384  # below, tiles of 128 columns are hardly more than multiprocessors

_WHOLE: list[tuple[int, Tiles]] = [
    (128, Tiles(128, 256, 64, 8, 4, tma=True)),
    (256, Tiles(128, 128, 64, 4, 3, tma=True)),
    (512, Tiles(128, 128, 64, 8, 4)),
    (0, Tiles(128, 256, 64, 8, 4, tma=True)),
]
_WHOLE_FP32 = [(16, Tiles(16, 64, 32, 4, 2)), (0, Tiles(64, 64, 32, 4, 2))]
# By dtype width and kind of weight: (most rows, tiles), the last for any number. Those of two bytes are the fastest on
# an H200 of `scripts/bench_chains.py --tiles`: where a multiprocessor has one program, it fetches far ahead.
_TILES: dict[tuple[int, str], list[tuple[int, Tiles]]] = {
    (2, "wide"): [
        (16, Tiles(16, 256, 64, 4, 4, tma=True)),
        (32, Tiles(32, 256, 64, 4, 4, tma=True)),
        (64, Tiles(64, 128, 64, 4, 4, tma=True)),
        *_WHOLE,
    ],
    (2, "narrow"): [
        (16, Tiles(16, 128, 128, 4, 4, tma=True)),
        (32, Tiles(32, 128, 128, 4, 4, tma=True)),
        (64, Tiles(64, 128, 128, 8, 4, tma=True)),
        *_WHOLE,
    ],
    (2, "segments"): [
        (16, Tiles(16, 128, 64, 4, 5, True, tma=True)),
        (32, Tiles(32, 128, 128, 8, 4, True, tma=True)),
        (64, Tiles(64, 128, 64, 8, 6, True, tma=True)),
        (128, Tiles(128, 128, 64, 8, 4, True, tma=True)),
        (256, Tiles(128, 128, 64, 8, 3, True, tma=True)),
        (512, Tiles(64, 128, 64, 4, 4, tma=True)),
        (0, Tiles(128, 256, 64, 8, 3, tma=True)),
    ],
    (4, "wide"): _WHOLE_FP32,
    (4, "narrow"): _WHOLE_FP32,
    (4, "segments"): [
        (16, Tiles(16, 64, 32, 4, 2, True)),
        (64, Tiles(64, 64, 32, 4, 2, True)),
        (0, Tiles(64, 64, 32, 4, 2)),
    ],
}


def segments_of(k: int, n: int) -> tuple[int, int]:
    """Number of segments and their length for a weight [k, n]: part of the order of addition, so of nothing else."""
    if n >= WIDE or k < LONG:
        return 1, k
    length = -(-k // (NUM_SEGMENTS * SEGMENT_MULTIPLE)) * SEGMENT_MULTIPLE
    return -(-k // length), length


def kind_of(k: int, n: int) -> str:
    """Of a weight [k, n], by what its tiles have to fill the machine with: segments, few columns or many."""
    if segments_of(k, n)[0] > 1:
        return "segments"
    return "narrow" if n < FEW_COLUMNS else "wide"


def tiles_for(num_rows: int, k: int, n: int, dtype: torch.dtype, one_family: bool = False) -> Tiles:
    """Tiles for that many rows. `one_family`: at least 64 rows a tile, so that one kind of instruction serves all."""
    rows = max(num_rows, 64) if one_family else num_rows
    table = _TILES[dtype.itemsize, kind_of(k, n)]
    tiles = next(tiles for most_rows, tiles in table if rows <= most_rows or most_rows == 0)
    return tiles._replace(block_n=min(tiles.block_n, max(16, triton.next_power_of_2(n))))
