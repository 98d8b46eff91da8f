"""Recurrent-state migration of the runners (DESIGN section 2): what moves before a forward pass, what is kept after.

Decisions come from `mamba_columns`. Copies go through one fused launch over every state of every row that moves
(`align_ctx` given), or through the scalar path: a pointer list, one entry a state and row, and `batch_memcpy`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mambalign.kernels.batch_memcpy import batch_memcpy
from mambalign.kernels.mamba_state_copy import CONV, MambaState, StateMeta, StateTable, describe_states
from mambalign.kernels.postprocess_mamba import postprocess_mamba_fused
from mambalign.kernels.precopy_mamba_align import precopy_mamba_align_fused
from mambalign.kernels.preprocess_mamba_align import preprocess_mamba_align_fused
from mambalign.worker.batch import ScheduledRow, SchedulerOutput
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import NULL_BLOCK, PrecopyInfo, postcopy, precopy
from mambalign.worker.state_cache import StateCache

if TYPE_CHECKING:
    from mambalign.worker.fused_copy_check import FusedCopyChecker, Mismatch
    from mambalign.worker.slot_batch import SlotBatch

COPY_BLOCK_SIZE = 8192  # bytes that a program holds in registers at a time
INTERPRETED_COPY_BLOCK_SIZE = 1 << 18  # the interpreter pays by the tile, whatever its size


class CopyCounts(NamedTuple):
    """Rows whose state moved, and those of them that moved it by a token bias > 0."""

    num_rows: int = 0
    num_biased_rows: int = 0
    mismatches: "tuple[Mismatch, ...]" = ()  # rows for which a checker found the copy wrong


class CpuGpuBuffer:
    """An array that the host fills (`np`, over pinned memory `cpu`) and the device reads (`gpu`).

    On a CPU all three are one memory. A copy is asynchronous: do not refill before the step's results are read.
    """

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device | str, fill: int = 0):
        self.device = torch.device(device)
        self.cpu = torch.full(shape, fill, dtype=dtype, pin_memory=self.device.type == "cuda")
        self.gpu = self.cpu.to(self.device)
        self.np: np.ndarray = self.cpu.numpy()

    def part(self, start: int, length: int) -> "CpuGpuBuffer":
        """Entries `start .. start+length-1` as a buffer of its own, over the same memory."""
        part = object.__new__(CpuGpuBuffer)
        part.device = self.device
        part.cpu, part.gpu = self.cpu[start : start + length], self.gpu[start : start + length]
        part.np = part.cpu.numpy()
        return part

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Send the first `n` entries (all without `n`); returns their device tensor."""
        gpu = self.gpu[:n]
        if self.gpu.data_ptr() != self.cpu.data_ptr():
            gpu.copy_(self.cpu[:n], non_blocking=True)
        return gpu


class MambaSpecDecodeGPUContext:
    """What the fused kernels read: metadata of every state, filled once, and the buffers a step is staged in.

    Small buffers are int32 `[max_num_reqs]`, by batch row (V1) or by slot (V2); the block table is
    `[max_num_reqs, num_groups, table_width]`. They share one allocation, so that V1 sends them in one copy.
    """

    def __init__(
        self,
        cache: StateCache,
        max_num_reqs: int,
        table_width: int,
        *,
        states: list[MambaState] | None = None,
        copy_block_size: int | None = None,
        num_programs: int | None = None,
    ):
        """`states`: what moves, when it is not simply every state of `cache` in group 0.

        Raises ValueError for states that the kernels cannot address.
        """
        self.states = mamba_states(cache) if states is None else states
        devices = {state.tensor.device for state in self.states}
        if len(devices) != 1:
            raise ValueError(f"states must lie on one device, got {sorted(map(str, devices)) or 'none'}")
        if cache.conv_layout not in ("SD", "DS"):
            raise ValueError(f"conv layout {cache.conv_layout!r} is neither SD nor DS")
        self.device = devices.pop()
        self.block_tokens = cache.mamba_block_tokens
        self.max_num_reqs = max_num_reqs
        if copy_block_size is None:
            copy_block_size = COPY_BLOCK_SIZE if self.device.type == "cuda" else INTERPRETED_COPY_BLOCK_SIZE
        self.state_table = StateTable.of(self.states, cache.conv_layout == "DS", copy_block_size, num_programs)

        num_groups = 1 + max(state.group for state in self.states)
        self._staged = CpuGpuBuffer(6 * max_num_reqs + 1, dtype=torch.int32, device=self.device)
        parts = [self._staged.part(i * max_num_reqs, max_num_reqs) for i in range(6)]
        self.mamba_state_idx_buf, self.precopy_src_col_buf, self.precopy_token_bias_buf = parts[:3]  # dest column first
        self.work_list_buf, self.num_kept_buf, self.num_computed_buf = parts[3:]
        self.work_count_buf = self._staged.part(6 * max_num_reqs, 1)
        self.precopy_src_col_buf.np[:] = -1
        self._staged.copy_to_gpu()
        self.block_table_buf = CpuGpuBuffer(
            max_num_reqs, num_groups, table_width, dtype=torch.int32, device=self.device, fill=NULL_BLOCK
        )
        self.num_accepted = torch.ones(max_num_reqs, dtype=torch.int32, device=self.device)

    @property
    def staging_bytes(self) -> int:
        """Device memory of metadata and staging buffers."""
        tensors = (self._staged.gpu, self.block_table_buf.gpu, self.num_accepted)
        return self.state_table.nbytes + sum(tensor.nbytes for tensor in tensors)

    def stage(self, num_reqs: int) -> None:
        """Send what the host has written for batch rows `0 .. num_reqs-1`."""
        self._staged.copy_to_gpu()
        self.block_table_buf.copy_to_gpu(num_reqs)

    def run_fused_precopy(
        self, num_reqs: int, *, idx_mapping: torch.Tensor | None = None, use_work_list: bool = True
    ) -> None:
        """Copy what the staging buffers decide. `idx_mapping` int32: batch row -> slot, negative skips (V2)."""
        precopy_mamba_align_fused(
            self.precopy_src_col_buf.gpu,
            self.mamba_state_idx_buf.gpu,
            self.precopy_token_bias_buf.gpu,
            self.block_table_buf.gpu,
            idx_mapping,
            self.work_list_buf.gpu if use_work_list else None,
            self.work_count_buf.gpu if use_work_list else None,
            num_reqs,
            self.state_table,
        )

    def run_fused_postprocess(
        self,
        num_reqs: int,
        *,
        num_kept: torch.Tensor | None = None,
        num_computed: torch.Tensor | None = None,
        idx_mapping: torch.Tensor | None = None,
    ) -> None:
        """Keep crossed boundaries and write `num_accepted`. V2 passes its own counts; V1 has staged them."""
        postprocess_mamba_fused(
            self.num_kept_buf.gpu if num_kept is None else num_kept,
            self.num_computed_buf.gpu if num_computed is None else num_computed,
            self.mamba_state_idx_buf.gpu,
            self.num_accepted,
            self.block_table_buf.gpu,
            idx_mapping,
            num_reqs,
            self.block_tokens,
            self.state_table,
        )

    def read_decisions(self, slots: torch.Tensor) -> list[PrecopyInfo]:
        """The last pre-copy's decisions of these slots (V1: batch rows), read back from the device."""
        buffers = (self.precopy_src_col_buf, self.mamba_state_idx_buf, self.precopy_token_bias_buf)
        columns = (buffer.gpu[slots].tolist() for buffer in buffers)
        return [PrecopyInfo(*decision) for decision in zip(*columns, strict=True)]


def mamba_states(cache: StateCache) -> list[MambaState]:
    """Every recurrent state of a cache: conv, temporal, carry."""
    states = [MambaState(tensor, "conv") for tensor in cache.conv]
    states += [MambaState(tensor, "temporal") for tensor in cache.temporal]
    return states if cache.carry is None else [*states, MambaState(cache.carry, "carry")]


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
    checker: "FusedCopyChecker | None" = None,
    checked: bool = False,
) -> CopyCounts:
    """Bring every scheduled row's live state into the running column of this step.

    V1 (an InputBatch) decides here: it writes the rows' block tables, running columns and `num_accepted`, and
    `scheduler_output.mamba_precopy_info`. V2 (a SlotBatch and `idx_mapping`, int32, row -> slot) decides on the
    device, in slot order, and reads nothing back unless a checker asks. `checked` asserts the laws of DESIGN section 2
    that a wrong schedule would break.
    """
    checker = checker if checker is not None and checker.wants_step() else None
    if idx_mapping is not None:
        return _preprocess_slots(scheduler_output, input_batch, align_ctx, idx_mapping, checker)
    rows, block_tokens = scheduler_output.rows, cache.mamba_block_tokens
    batch_rows = [input_batch.set_blocks(scheduled) for scheduled in rows]
    columns, accepted = (
        values[batch_rows].tolist() for values in (input_batch.mamba_state_idx, input_batch.num_accepted)
    )
    expected = checker.expect(_rows_before(input_batch, batch_rows, rows)) if checker else None
    infos = [
        precopy(column, scheduled.num_computed_tokens, scheduled.num_tokens, a, block_tokens)
        for scheduled, column, a in zip(rows, columns, accepted, strict=True)
    ]
    for scheduled, info in zip(rows, infos, strict=True):
        assert scheduled.is_decode or info.token_bias == 0, f"{scheduled.request_id} prefills with {info}"
    scheduler_output.mamba_precopy_info = infos
    moves = [(row, info) for row, info in zip(batch_rows, infos, strict=True) if info.source_column >= 0]
    if checked:
        _check_moves(input_batch, moves, cache)
    fused = _resolve_fused_precopy(align_ctx, scheduler_output) if moves else None
    if fused is not None:
        align_ctx.block_table_buf.np[: len(infos), 0] = input_batch.mamba_block_table[batch_rows]
        fused.run()
    elif moves:
        _copy_scalar(input_batch, moves, cache)
    input_batch.mamba_state_idx[batch_rows] = [info.dest_column for info in infos]
    input_batch.num_accepted[[row for row, _ in moves]] = 1
    mismatches = ()
    if checker:
        mismatches = checker.check(expected, infos if fused is None else fused.decisions())
    return CopyCounts(len(moves), sum(info.token_bias > 0 for _, info in moves), tuple(mismatches))


class RowBefore(NamedTuple):
    """One row's own numbers, before a step's decisions."""

    request_id: str
    running_column: int
    num_computed_tokens: int  # n
    num_tokens: int  # q
    num_accepted: int
    table_row: np.ndarray  # int32 [columns], block ids


def _rows_before(input_batch: InputBatch, batch_rows: list[int], rows: list[ScheduledRow]) -> list[RowBefore]:
    return [
        RowBefore(
            scheduled.request_id,
            int(input_batch.mamba_state_idx[row]),
            scheduled.num_computed_tokens,
            scheduled.num_tokens,
            int(input_batch.num_accepted[row]),
            input_batch.mamba_block_table[row],
        )
        for row, scheduled in zip(batch_rows, rows, strict=True)
    ]


def _preprocess_slots(
    scheduler_output: SchedulerOutput,
    batch: "SlotBatch",
    ctx: MambaSpecDecodeGPUContext,
    idx_mapping: torch.Tensor,
    checker: "FusedCopyChecker | None",
) -> CopyCounts:
    """V2: two launches, the decisions and the copies they ask for; nothing is read back without a checker."""
    rows = scheduler_output.rows
    expected = checker.expect(_slots_before(scheduler_output, batch, ctx, idx_mapping)) if checker else None
    num_scheduled = batch.to_device([row.num_tokens for row in rows], torch.int32)
    preprocess_mamba_align_fused(
        idx_mapping,
        num_scheduled,
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


def _slots_before(
    scheduler_output: SchedulerOutput, batch: "SlotBatch", ctx: MambaSpecDecodeGPUContext, idx_mapping: torch.Tensor
) -> list[RowBefore]:
    slots = idx_mapping.long()
    device = (batch.running_column, batch.num_computed, batch.num_accepted)
    columns, computed, accepted = (tensor[slots].tolist() for tensor in device)
    tables = ctx.block_table_buf.gpu[slots, 0].cpu().numpy()
    return [
        RowBefore(row.request_id, columns[i], computed[i], row.num_tokens, accepted[i], tables[i])
        for i, row in enumerate(scheduler_output.rows)
    ]


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
        ends_on_boundary = info is not None and info.dest_column == column
        if not ends_on_boundary:
            input_batch.num_accepted[row] = kept
        if info is not None and not (ends_on_boundary and info.token_bias == 0):
            moves.append((row, PrecopyInfo(column, info.dest_column, info.token_bias)))
    if checked:
        _check_moves(input_batch, moves, cache)
    if moves and align_ctx is not None:
        _stage_postprocess(scheduler_output, num_kept, input_batch, batch_rows, align_ctx)
        align_ctx.run_fused_postprocess(len(batch_rows))
    elif moves:
        _copy_scalar(input_batch, moves, cache)
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


def _check_moves(input_batch: InputBatch, moves: list[tuple[int, PrecopyInfo]], cache: StateCache) -> None:
    """Checked mode: bias and columns in range, named blocks real, and no row writes what another reads or writes."""
    table = input_batch.mamba_block_table
    readers: dict[int, set[int]] = {}
    writers: dict[int, int] = {}
    for row, (source, dest, bias) in moves:
        assert 0 <= bias <= num_spec_tokens(cache), f"row {row}: num_accepted {bias + 1} is not in 1..S+1"
        columns = (source, source + bias, dest)
        assert min(columns) >= 0 and max(columns) < table.shape[1], f"row {row}: {columns} leave the block table"
        blocks = table[row, columns].tolist()
        assert NULL_BLOCK not in blocks, f"row {row}: a column of {columns} has no block: {blocks}"
        for block in blocks[:2]:
            readers.setdefault(block, set()).add(row)
        assert writers.setdefault(blocks[2], row) == row, f"rows {writers[blocks[2]]} and {row} write one block"
    for block, row in writers.items():
        others = readers.get(block, set()) - {row}
        assert not others, f"row {row} writes block {block}, which rows {sorted(others)} read"


def num_spec_tokens(cache: StateCache) -> int:
    """S: the conv slots that a state has for drafts."""
    state_len = cache.conv[0].shape[2 if cache.conv_layout == "DS" else 1]
    return state_len - (cache.conv_width - 1)


class MambaCopySpec(NamedTuple):
    """Bytes to copy: `num_bytes` from `source_address`, to the start of the destination block."""

    source_address: int
    num_bytes: int


def get_conv_copy_spec(
    meta: StateMeta, table_row: np.ndarray, source_column: int, num_accepted: int, conv_layout: str
) -> MambaCopySpec:
    """The conv window of a row that accepted `num_accepted` tokens: `block[source_column]` without its oldest slots.

    In DS the window is a strided piece of every channel, which one copy cannot express: only the fused kernel does it.
    """
    assert conv_layout == "SD" or num_accepted == 1, (
        f"a DS conv state with num_accepted {num_accepted} > 1 has no contiguous tail; it needs the fused copy"
    )
    shift = (num_accepted - 1) * meta.row_stride
    address = meta.base + int(table_row[source_column]) * meta.block_stride
    return MambaCopySpec(address + shift, meta.inner_size - shift)


def get_temporal_copy_spec(
    meta: StateMeta, table_row: np.ndarray, source_column: int, num_accepted: int, conv_layout: str
) -> MambaCopySpec:
    """A temporal state or carry: the whole block that the last accepted token left."""
    block = int(table_row[source_column + num_accepted - 1])
    return MambaCopySpec(meta.base + block * meta.block_stride, meta.inner_size)


class MambaCopyList:
    """Pointer list of the scalar path: sources, destinations, sizes."""

    def __init__(self) -> None:
        self.sources: list[int] = []
        self.dests: list[int] = []
        self.sizes: list[int] = []


def collect_mamba_copy_meta(
    copies: MambaCopyList,
    metas: list[StateMeta],
    conv_layout: str,
    table_row: np.ndarray,
    info: PrecopyInfo,
) -> None:
    """Append one row's copies, one a state; a copy of a block onto itself is left out. `table_row`: group 0's."""
    for meta in metas:
        get_copy_spec = get_conv_copy_spec if meta.kind == CONV else get_temporal_copy_spec
        spec = get_copy_spec(meta, table_row, info.source_column, info.token_bias + 1, conv_layout)
        dest = meta.base + int(table_row[info.dest_column]) * meta.block_stride
        if dest != spec.source_address:
            copies.sources.append(spec.source_address)
            copies.dests.append(dest)
            copies.sizes.append(spec.num_bytes)


def do_mamba_copy_block(copies: MambaCopyList, device: torch.device | str) -> None:
    """Run a pointer list."""
    if copies.sizes:
        batch_memcpy(*torch.tensor([copies.sources, copies.dests, copies.sizes]).to(device))


def _copy_scalar(input_batch: InputBatch, moves: list[tuple[int, PrecopyInfo]], cache: StateCache) -> None:
    states = mamba_states(cache)
    metas = describe_states(states, cache.conv_layout == "DS", COPY_BLOCK_SIZE)
    copies = MambaCopyList()
    for row, info in moves:
        collect_mamba_copy_meta(copies, metas, cache.conv_layout, input_batch.mamba_block_table[row], info)
    do_mamba_copy_block(copies, states[0].tensor.device)
