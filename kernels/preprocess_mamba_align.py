"""The pre-copy decision of every row, on the device: running columns, biases, and the list of rows that move (V2)."""

import torch
import triton
import triton.language as tl

from mambalign.kernels.launch import runs_kernel
from mambalign.kernels.rows import STEP_POINTERS


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=STEP_POINTERS)
def preprocess_mamba_align_fused_kernel(
    p_idx_mapping,
    p_num_scheduled,
    p_num_computed,
    p_running_column,
    p_num_accepted,
    p_source_column,
    p_token_bias,
    p_work_list,
    p_work_count,
    p_move_totals,
    num_reqs,
    block_tokens,
    ROWS: tl.constexpr,
):
    """c' = max(c, cdiv(n+q, B) - 1); a row moves if c >= 0 and c != c', by bias a-1, and a becomes 1.

    Grid: one program, which owns every row; rows whose slot is negative are skipped.
    Reads n, q, a, c; writes c', source column (-1: stays), bias, a, the batch rows that move with their number, totals.
    Integers, int32. In place for running_column and num_accepted: each slot belongs to one row.
    """
    rows = tl.arange(0, ROWS)
    slots = tl.load(p_idx_mapping + rows, mask=rows < num_reqs, other=-1)
    live = slots >= 0
    n = tl.load(p_num_computed + slots, mask=live, other=0)
    q = tl.load(p_num_scheduled + rows, mask=live, other=0)
    column = tl.load(p_running_column + slots, mask=live, other=-1)
    accepted = tl.load(p_num_accepted + slots, mask=live, other=1)
    dest = tl.maximum(column, (n + q + block_tokens - 1) // block_tokens - 1)
    moves = live & (column >= 0) & (column != dest)
    tl.store(p_source_column + slots, tl.where(moves, column, -1), mask=live)
    tl.store(p_running_column + slots, dest, mask=live)
    tl.store(p_token_bias + slots, accepted - 1, mask=live)
    tl.store(p_num_accepted + slots, tl.where(moves, 1, accepted), mask=live)
    tl.store(p_work_list + tl.cumsum(moves.to(tl.int32), 0) - 1, rows, mask=moves)
    num_moves, num_biased = tl.sum(moves.to(tl.int32), 0), tl.sum((moves & (accepted > 1)).to(tl.int32), 0)
    tl.store(p_work_count, num_moves)
    tl.store(p_move_totals, tl.load(p_move_totals) + num_moves)
    tl.store(p_move_totals + 1, tl.load(p_move_totals + 1) + num_biased)


def preprocess_mamba_align_fused_reference(
    idx_mapping: torch.Tensor,
    num_scheduled: torch.Tensor,
    num_computed: torch.Tensor,
    running_column: torch.Tensor,
    num_accepted: torch.Tensor,
    source_column: torch.Tensor,
    token_bias: torch.Tensor,
    work_list: torch.Tensor,
    work_count: torch.Tensor,
    move_totals: torch.Tensor,
    num_reqs: int,
    block_tokens: int,
) -> None:
    """Decide for batch rows `0 .. num_reqs-1`; everything int32.

    By batch row: idx_mapping (slot, negative skips), num_scheduled (q), work_list out. By slot: num_computed (n),
    running_column and num_accepted in and out, source_column and token_bias out. work_count out: `[1]`.
    move_totals int64 `[2]` grows by the rows that move, and by those of them with a bias > 0.
    """
    slots = idx_mapping[:num_reqs].long()
    rows = torch.nonzero(slots >= 0).flatten()
    slots = slots[rows]
    column, accepted = running_column[slots], num_accepted[slots]
    after = num_computed[slots] + num_scheduled[rows]
    dest = torch.maximum(column, (after + block_tokens - 1) // block_tokens - 1)
    moves = (column >= 0) & (column != dest)
    source_column[slots] = torch.where(moves, column, -1)
    running_column[slots] = dest
    token_bias[slots] = accepted - 1
    num_accepted[slots] = torch.where(moves, 1, accepted)
    moved_rows = rows[moves].to(work_list.dtype)
    work_list[: len(moved_rows)] = moved_rows
    work_count[0] = len(moved_rows)
    move_totals += torch.stack([moves.sum(), (moves & (accepted > 1)).sum()])


def preprocess_mamba_align_fused(
    idx_mapping: torch.Tensor,
    num_scheduled: torch.Tensor,
    num_computed: torch.Tensor,
    running_column: torch.Tensor,
    num_accepted: torch.Tensor,
    source_column: torch.Tensor,
    token_bias: torch.Tensor,
    work_list: torch.Tensor,
    work_count: torch.Tensor,
    move_totals: torch.Tensor,
    num_reqs: int,
    block_tokens: int,
) -> None:
    """`preprocess_mamba_align_fused_reference`, on the device: one small launch, no synchronisation."""
    arguments = (
        idx_mapping, num_scheduled, num_computed, running_column, num_accepted,
        source_column, token_bias, work_list, work_count, move_totals, num_reqs, block_tokens,
    )  # fmt: skip
    if not runs_kernel(running_column):
        return preprocess_mamba_align_fused_reference(*arguments)
    rows = triton.next_power_of_2(work_list.shape[0])
    preprocess_mamba_align_fused_kernel[(1,)](*arguments, ROWS=rows, num_warps=4)
