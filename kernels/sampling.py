"""The best token of each row of logits, on the device.

Nothing here adds floating-point numbers, so nothing depends on order; ties go to the lowest id. A row that holds a NaN,
or whose largest is infinite, has no best token: NO_BEST stands in its place.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

SPLIT = 4096  # columns of a program of the first stage
BLOCK = 2048  # columns that it looks at together
NO_ID: tl.constexpr = tl.constexpr(2**31 - 1)
NO_BEST: tl.constexpr = tl.constexpr(-1)


@triton.jit(do_not_specialize=["V", "num_splits"])
def argmax_split_kernel(
    p_logits, p_value, p_index, V, num_splits, WORD: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """value, index[row, split] = the largest of logits[row, split * SPLIT ...] and the lowest column that holds it.

    Grid: (rows, splits); a program owns SPLIT columns of a row. Reads logits, writes one value and one column.
    fp32; a NaN counts as inf, so that the value tells of it. WORD divides V.
    """
    wait_for_inputs(PDL)
    V = V // WORD * WORD
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_column = i_split * SPLIT + tl.arange(0, BLOCK)
    b_best, b_index = tl.full((BLOCK,), float("-inf"), tl.float32), o_column
    for first in range(0, SPLIT, BLOCK):
        b_logit = tl.load(p_logits + i_row * V + first + o_column, mask=first + o_column < V, other=float("-inf"))
        b_logit = tl.where(b_logit == b_logit, b_logit, float("inf"))
        is_better = b_logit > b_best
        b_best, b_index = tl.where(is_better, b_logit, b_best), tl.where(is_better, first + o_column, b_index)
    best = tl.max(b_best, axis=0)
    tl.store(p_value + i_row * num_splits + i_split, best)
    tl.store(p_index + i_row * num_splits + i_split, tl.min(tl.where(b_best == best, b_index, NO_ID), axis=0))


@triton.jit(do_not_specialize=["num_splits", "out_stride"], do_not_specialize_on_alignment=["p_out"])
def argmax_merge_kernel(p_value, p_index, p_out, num_splits, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[row] = index of the largest value of its splits, the lowest of several; NO_BEST if it is infinite.

    Grid: rows; a program owns one. Reads a value and a column a split, writes int64.
    """
    wait_for_inputs(PDL)
    i_row, o_split = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    b_value = tl.load(p_value + i_row * num_splits + o_split, mask=o_split < num_splits, other=float("-inf"))
    b_index = tl.load(p_index + i_row * num_splits + o_split, mask=o_split < num_splits, other=NO_ID)
    best = tl.max(b_value, axis=0)
    i_best = tl.min(tl.where(b_value == best, b_index, NO_ID), axis=0)
    tl.store(p_out + i_row * out_stride, tl.where(tl.abs(best) < float("inf"), i_best, NO_BEST).to(tl.int64))


def argmax_rows_reference(logits: torch.Tensor) -> torch.Tensor:
    """Column of the largest of each row of logits [N, V] fp32, the lowest of several, or NO_BEST; int64 [N]."""
    best = logits.max(dim=1, keepdim=True).values  # NaN, if there is one
    columns = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    first = torch.where(logits == best, columns, logits.shape[1]).min(dim=1).values
    return torch.where(best[:, 0].isfinite(), first, NO_BEST.value)


def argmax_rows(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`argmax_rows_reference`, on a GPU in two launches without synchronisation. logits: contiguous.

    out int64 [N], apart or not: where to write.
    """
    if logits.is_cuda:
        return argmax_rows_on_gpu(logits, out)
    best = torch.argmax(logits, dim=1)  # the first NaN, if there is one
    is_best = logits.gather(1, best[:, None])[:, 0].isfinite()
    return torch.where(is_best, best, best.new_full((), NO_BEST.value), out=out)


def argmax_rows_on_gpu(
    logits: torch.Tensor, out: torch.Tensor | None = None, split: int = SPLIT, block: int = BLOCK
) -> torch.Tensor:
    """The kernels behind `argmax_rows`. Raises ValueError for logits that are not fp32 and contiguous."""
    num_rows, num_columns = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or num_columns == 0:
        raise ValueError(f"argmax_rows takes contiguous fp32 rows, got {logits.dtype}, strides {logits.stride()}")
    num_splits = triton.cdiv(num_columns, split)
    value = logits.new_empty(num_rows, num_splits)
    index = torch.empty(num_rows, num_splits, dtype=torch.int32, device=logits.device)
    if num_rows:
        word = 1 if num_columns % 4 else 4
        argmax_split_kernel[(num_rows, num_splits)](
            logits, value, index, num_columns, num_splits, word, split, block, **pdl(logits.device)
        )
    return best_of_splits(value, index, out)


def best_of_splits(value: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Of rows cut into splits, the column of the largest value, the lowest of several; NO_BEST if it is infinite.

    value [N, splits] fp32 and index [N, splits] int32, contiguous: the largest of each split, and its lowest column.
    out int64 [N], apart or not: where to write. Returns it.
    """
    num_rows, num_splits = value.shape
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=value.device)
    if num_rows:
        block = triton.next_power_of_2(num_splits)
        argmax_merge_kernel[(num_rows,)](
            value, index, out, num_splits, out.stride(0), block,
            num_warps=min(8, max(1, block // 256)), **pdl(value.device),
        )  # fmt: skip
    return out
