"""Copies between raw addresses, many at a time: the scalar migration path, which the fused kernels are checked by."""

import ctypes

import torch


def batch_memcpy_reference(sources: torch.Tensor, dests: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copy `sizes[i]` bytes from address `sources[i]` to `dests[i]` in host memory, like memmove. int64 `[n]` each."""
    for source, dest, size in zip(sources.tolist(), dests.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(dest, source, size)


def batch_memcpy(sources: torch.Tensor, dests: torch.Tensor, sizes: torch.Tensor) -> None:
    """`batch_memcpy_reference`, on whichever device the addresses belong to."""
    batch_memcpy_reference(sources, dests, sizes)
