"""Sizes of the chunked Mamba-2 scan: what the scheduler must know of it, and what is tuned. Imports no torch."""

from typing import NamedTuple

CHUNK = 32  # tokens; another number gives other bits


class ChunkTiles(NamedTuple):
    """How the kernel divides its work. All but `chunk` leave the bits as they are."""

    chunk: int  # tokens; CHUNK but in a benchmark
    parts: int  # programs that share a head, if it has the 16 rows of the state for each that a product needs
    num_warps: int
    num_stages: int  # chunks whose inputs are on their way or in use


TILES = ChunkTiles(CHUNK, parts=1, num_warps=4, num_stages=3)  # the fastest on an H200: `--chunk-tiles`
