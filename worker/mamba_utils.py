"""Recurrent-state migration of the runners (DESIGN section 2): what moves before a forward pass, what is kept after.

Decisions come from `mamba_columns`. Copies go through one fused launch over every state of every row that moves
(`align_ctx` given), or one by one through `scalar_copy`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mambalign.kernels.preprocess_mamba_align import preprocess_mamba_align_fused
from mambalign.worker.batch import SchedulerOutput
from mambalign.worker.cpu_gpu_buffer import CpuGpuBuffer
from mambalign.worker.fused_copy_check import FusedCopyChecker, Mismatch
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import PrecopyInfo, postcopy, precopy
from mambalign.worker.mamba_gpu_context import MambaSpecDecodeGPUContext
from mambalign.worker.mamba_laws import check_moves, check_prefills, check_rows
from mambalign.worker.scalar_copy import copy_scalar, get_conv_copy_spec, get_temporal_copy_spec
from mambalign.worker.state_cache import StateCache

if TYPE_CHECKING:
    from mambalign.worker.slot_batch import SlotBatch

# Names that people coming from other engines look for here.
__all__ = [
    "CpuGpuBuffer",
    "MambaSpecDecodeGPUContext",
    "get_conv_copy_spec",
    "get_temporal_copy_spec",
    "postprocess_mamba",
    "preprocess_mamba",
]


class CopyCounts(NamedTuple):
    """Rows whose state moved, and those of them that moved it by a token bias > 0."""

    num_rows: int = 0
    num_biased_rows: int = 0
    mismatches: tuple[Mismatch, ...] = ()  # rows for which a checker found the copy wrong


@dataclass(frozen=True)
class _FusedPrecopy:
    """A step's pre-copy, staged for V1's batch rows and ready to launch."""

    align_ctx: MambaSpecDecodeGPUContext
    num_reqs: int

    def run(self) -> None:
        self.align_ctx.stage(self.num_reqs)
        self.align_ctx.run_fused_precopy(self.num_reqs)

    def decisions(self) -> list[PrecopyInfo]:
        """The decisions that the launch ran with, read back from the device."""
        return self.align_ctx.read_decisions(torch.arange(self.num_reqs))


def _resolve_fused_precopy(
    align_ctx: MambaSpecDecodeGPUContext | None, scheduler_output: SchedulerOutput
) -> _FusedPrecopy | None:
    """Write the step's decisions into the staging buffers, in batch order.

    None when there is no context (the scalar path copies) or no row moves. The caller fills the block table.
    """
    infos = scheduler_output.mamba_precopy_info
    if align_ctx is None or not infos:
        return None
    assert len(infos) == len(scheduler_output.rows), "one decision a scheduled row"
    decisions = np.array(infos, np.int32)
    work_list = np.flatnonzero(decisions[:, 0] >= 0)
    if not len(work_list):
        return None
    num_reqs = len(infos)
    align_ctx.precopy_src_col_buf.np[:num_reqs] = decisions[:, 0]
    align_ctx.mamba_state_idx_buf.np[:num_reqs] = decisions[:, 1]
    align_ctx.precopy_token_bias_buf.np[:num_reqs] = decisions[:, 2]
    align_ctx.work_list_buf.np[: len(work_list)] = work_list
    align_ctx.work_count_buf.np[0] = len(work_list)
    return _FusedPrecopy(align_ctx, num_reqs)


def preprocess_mamba(
    scheduler_output: SchedulerOutput,
    input_batch: "InputBatch | SlotBatch",
    cache: StateCache,
    *,
    align_ctx: MambaSpecDecodeGPUContext | None = None,
    idx_mapping: torch.Tensor | None = None,
    checker: FusedCopyChecker | None = None,
    checked: bool = False,
) -> CopyCounts:
    """Bring every scheduled row's live state into the running column of this step.

    V1 (an InputBatch) decides here: it writes the rows' block tables, running columns and `num_accepted`, and
    `scheduler_output.mamba_precopy_info`. V2 (a SlotBatch and `idx_mapping`, int32, row -> slot) decides on the
    device, in slot order, and reads nothing back but for a checker or `checked`. `checked` asserts the laws of DESIGN
    section 2 that a wrong schedule would break.
    """
    checker = checker if checker is not None and checker.wants_step() else None
    if idx_mapping is not None:
        return _preprocess_slots(scheduler_output, input_batch, cache, align_ctx, idx_mapping, checker, checked)
    rows, block_tokens = scheduler_output.rows, cache.mamba_block_tokens
    batch_rows = [input_batch.set_blocks(scheduled) for scheduled in rows]
    columns, accepted = (
        values[batch_rows].tolist() for values in (input_batch.mamba_state_idx, input_batch.num_accepted)
    )
    before = input_batch.rows_before(rows) if checker or checked else []
    expected = checker.expect(before) if checker else None
    infos = [
        precopy(column, scheduled.num_computed_tokens, scheduled.num_tokens, a, block_tokens)
        for scheduled, column, a in zip(rows, columns, accepted, strict=True)
    ]
    check_prefills(rows, infos)
    scheduler_output.mamba_precopy_info = infos
    moves = [(row, info) for row, info in zip(batch_rows, infos, strict=True) if info.source_column >= 0]
    if checked:
        check_rows(before, infos, cache)
    fused = _resolve_fused_precopy(align_ctx, scheduler_output) if moves else None
    if fused is not None:
        align_ctx.block_table_buf.np[: len(infos), 0] = input_batch.mamba_block_table[batch_rows]
        fused.run()
    elif moves:
        copy_scalar(input_batch.mamba_block_table, moves, cache)
    input_batch.mamba_state_idx[batch_rows] = [info.dest_column for info in infos]
    input_batch.num_accepted[[row for row, _ in moves]] = 1
    mismatches = ()
    if checker:
        mismatches = checker.check(expected, infos if fused is None else fused.decisions())
    return CopyCounts(len(moves), sum(info.token_bias > 0 for _, info in moves), tuple(mismatches))


def _preprocess_slots(
    scheduler_output: SchedulerOutput,
    batch: "SlotBatch",
    cache: StateCache,
    ctx: MambaSpecDecodeGPUContext,
    idx_mapping: torch.Tensor,
    checker: FusedCopyChecker | None,
    checked: bool,
) -> CopyCounts:
    """V2: two launches, the decisions and the copies they ask for."""
    rows = scheduler_output.rows
    before = batch.rows_before(rows, idx_mapping) if checker or checked else []
    if checked:
        infos = [row.precopy(ctx.block_tokens) for row in before]
        check_prefills(rows, infos)
        check_rows(before, infos, cache)
    expected = checker.expect(before) if checker else None
    preprocess_mamba_align_fused(
        idx_mapping,
        batch.send_num_scheduled([len(row.token_ids) for row in rows]),
        batch.num_computed,
        batch.running_column,
        batch.num_accepted,
        ctx.precopy_src_col_buf.gpu,
        ctx.precopy_token_bias_buf.gpu,
        ctx.work_list_buf.gpu,
        ctx.work_count_buf.gpu,
        batch.precopy_totals,
        len(rows),
        ctx.block_tokens,
    )
    ctx.run_fused_precopy(len(rows), idx_mapping=idx_mapping)
    if checker is None:
        return CopyCounts()
    fused = ctx.read_decisions(idx_mapping.long())
    return CopyCounts(mismatches=tuple(checker.check(expected, fused)))


def postprocess_mamba(
    scheduler_output: SchedulerOutput,
    num_kept: list[int],
    input_batch: InputBatch,
    cache: StateCache,
    *,
    align_ctx: MambaSpecDecodeGPUContext | None = None,
    checked: bool = False,
) -> int:
    """Keep the state at every boundary that a decode row crossed, and set `num_accepted`.

    `num_kept`: one a scheduled row, tokens of the step whose state is final (1..q); a prefill row's entry is ignored.
    Returns how many rows moved bytes.
    """
    block_tokens = cache.mamba_block_tokens
    batch_rows = [input_batch.row_of[scheduled.request_id] for scheduled in scheduler_output.rows]
    moves: list[tuple[int, PrecopyInfo]] = []
    for row, scheduled, kept in zip(batch_rows, scheduler_output.rows, num_kept, strict=True):
        input_batch.num_accepted[row] = 1
        if not scheduled.is_decode:
            continue
        assert 1 <= kept <= scheduled.num_tokens, f"{scheduled.request_id} kept {kept} of {scheduled.num_tokens}"
        column = int(input_batch.mamba_state_idx[row])
        info = postcopy(column, scheduled.num_computed_tokens, kept, block_tokens)
        if info is None or info.dest_column != column:
            input_batch.num_accepted[row] = kept
        if info is not None and info.move is not None:
            moves.append((row, info.move))
    if checked:
        check_moves([(str(row), input_batch.mamba_block_table[row], move) for row, move in moves])
    if moves and align_ctx is not None:
        _stage_postprocess(scheduler_output, num_kept, input_batch, batch_rows, align_ctx)
        align_ctx.run_fused_postprocess(len(batch_rows))
    elif moves:
        copy_scalar(input_batch.mamba_block_table, moves, cache)
    return len(moves)


def _stage_postprocess(
    scheduler_output: SchedulerOutput,
    num_kept: list[int],
    input_batch: InputBatch,
    batch_rows: list[int],
    align_ctx: MambaSpecDecodeGPUContext,
) -> None:
    rows, n = scheduler_output.rows, len(batch_rows)
    align_ctx.num_kept_buf.np[:n] = [
        kept if scheduled.is_decode else 0 for scheduled, kept in zip(rows, num_kept, strict=True)
    ]
    align_ctx.num_computed_buf.np[:n] = [scheduled.num_computed_tokens for scheduled in rows]
    align_ctx.mamba_state_idx_buf.np[:n] = input_batch.mamba_state_idx[batch_rows]
    align_ctx.block_table_buf.np[:n, 0] = input_batch.mamba_block_table[batch_rows]
    align_ctx.stage(n)
