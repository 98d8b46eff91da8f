"""Chosen rows of one tensor, side by side: `scatter_rows` the other way round."""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

BLOCK = 1024


@triton.jit(do_not_specialize=["index_stride"], do_not_specialize_on_alignment=["index"])
def gather_rows_kernel(
    source, dest, index, index_stride,
    SOURCE_STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dest[t] = source[max(index[t], 0)].

    Grid: (rows of dest, tiles of BLOCK elements). A program copies one tile of one row.
    """
    wait_for_inputs(PDL)
    i_t, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.maximum(tl.load(index + i_t * index_stride), 0).to(tl.int64)
    o_w = i_tile * BLOCK + tl.arange(0, BLOCK)
    b_value = tl.load(source + row * SOURCE_STRIDE + o_w, mask=o_w < WIDTH)
    tl.store(dest + i_t * WIDTH + o_w, b_value, mask=o_w < WIDTH)


def gather_rows_reference(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[T, width]: rows index[t] (int64 [T]) of source [N, width], both apart or not; -1 gets row 0."""
    return source[index.clamp(min=0)]


def gather_rows(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`gather_rows_reference`."""
    return (gather_rows_on_gpu if source.is_cuda else gather_rows_reference)(source, index)


def gather_rows_on_gpu(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`gather_rows_reference` by its kernel."""
    (num_rows,), width = index.shape, source.shape[1]
    assert source.stride(1) == 1
    dest = torch.empty(num_rows, width, dtype=source.dtype, device=source.device)
    if num_rows:
        gather_rows_kernel[(num_rows, triton.cdiv(width, BLOCK))](
            source, dest, index, index.stride(0), source.stride(0), width, BLOCK, **pdl(source.device)
        )
    return dest
