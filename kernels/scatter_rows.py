"""Rows of one tensor into chosen rows of another; a negative index skips. Nothing is read back to the host."""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["index"])
def scatter_rows_kernel(source, dest, index, source_stride, dest_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """dest[index[t]] = source[t] for index[t] >= 0.

    Grid: (rows of source, tiles of BLOCK elements). A program copies one tile of one row. Two rows with one index are
    the caller's mistake.
    """
    wait_for_inputs(PDL)
    i_t, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_row = tl.load(index + i_t).to(tl.int64)
    if b_row >= 0:
        o_w = i_tile * BLOCK + tl.arange(0, BLOCK)
        b_value = tl.load(source + i_t * source_stride + o_w, mask=o_w < width)
        tl.store(dest + b_row * dest_stride + o_w, b_value, mask=o_w < width)


def scatter_rows_reference(source: torch.Tensor, dest: torch.Tensor, index: torch.Tensor) -> None:
    """Torch reference of `scatter_rows`."""
    is_kept = index >= 0
    dest[index[is_kept].long()] = source[is_kept]


def scatter_rows(source: torch.Tensor, dest: torch.Tensor, index: torch.Tensor) -> None:
    """Copy row t of source [T, width] to row index[t] (int, [T]) of dest [N, width], both apart or not; -1 skips."""
    if dest.is_cuda:
        scatter_rows_on_gpu(source, dest, index)
    else:
        scatter_rows_reference(source, dest, index)


def scatter_rows_on_gpu(source: torch.Tensor, dest: torch.Tensor, index: torch.Tensor) -> None:
    """`scatter_rows` by the kernel."""
    num_rows, width = source.shape
    grid = (num_rows, triton.cdiv(width, BLOCK))
    scatter_rows_kernel[grid](source, dest, index, source.stride(0), dest.stride(0), width, BLOCK, **pdl(dest.device))
