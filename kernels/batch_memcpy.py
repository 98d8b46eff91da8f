"""Copies between raw addresses, many at a time: the scalar migration path, which the fused kernels are checked by."""

import ctypes

import torch
import triton
import triton.language as tl

from mambalign.kernels.launch import runs_kernel
from mambalign.kernels.move_bytes import move_bytes

COPY_BLOCK_SIZE = 32768


@triton.jit
def batch_memcpy_kernel(p_sources, p_dests, p_sizes, COPY_BLOCK_SIZE: tl.constexpr):
    """dest[k] = source[k] for k < size.

    Grid: one program a copy, which it owns whole.
    Reads three int64 lists and the sources; writes the destinations.
    Bytes are moved, not numbers. In place: a copy may overlap itself to the left; two copies may not overlap.
    """
    i = tl.program_id(0)
    source, dest, size = tl.load(p_sources + i), tl.load(p_dests + i), tl.load(p_sizes + i)
    access_size = tl.where((source | dest | size) % 16 == 0, 16, 1)
    move_bytes(source, dest, size, access_size, COPY_BLOCK_SIZE)


def batch_memcpy_reference(sources: torch.Tensor, dests: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copy `sizes[i]` bytes from address `sources[i]` to `dests[i]` in host memory, like memmove. int64 `[n]` each."""
    for source, dest, size in zip(sources.tolist(), dests.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(dest, source, size)


def batch_memcpy(sources: torch.Tensor, dests: torch.Tensor, sizes: torch.Tensor) -> None:
    """`batch_memcpy_reference`, on whichever device the three lists lie."""
    if not runs_kernel(sizes):
        return batch_memcpy_reference(sources, dests, sizes)
    batch_memcpy_kernel[(len(sizes),)](
        sources, dests, sizes, COPY_BLOCK_SIZE=COPY_BLOCK_SIZE, num_warps=4, num_stages=1
    )
