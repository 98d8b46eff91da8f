"""Before the forward pass: every state of the rows whose running column moves, one launch for all of them."""

import torch
import triton
import triton.language as tl

from mambalign.kernels.launch import runs_kernel
from mambalign.kernels.mamba_state_copy import (
    LAUNCH_OPTIONS,
    _copy_mamba_states,
    _return_tickets,
    copy_mamba_state_block_reference,
)
from mambalign.kernels.mamba_state_table import StateTable, _tile_meta
from mambalign.kernels.rows import STEP_POINTERS


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=STEP_POINTERS)
def precopy_mamba_align_fused_kernel(
    p_source_column,
    p_dest_column,
    p_token_bias,
    p_block_table,
    p_idx_mapping,
    p_work_list,
    p_work_count,
    num_reqs,
    p_state_meta,
    p_tile_state,
    p_tickets,
    num_tiles,
    num_conv_tiles,
    num_groups,
    table_width,
    HAS_IDX_MAPPING: tl.constexpr,
    HAS_WORK_LIST: tl.constexpr,
    COPY_BLOCK_SIZE: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
):
    """block[dest_column] = block[source_column + bias] (conv: block[source_column] shifted left by bias), all states.

    Grid: any fixed number of programs, so that a step in which nothing moves costs one load of the counter. Program p
    owns tile p of all moving rows' tiles, then whichever its tickets name: some multiprocessors copy faster.
    Reads decisions, block tables, metadata and source blocks; writes destination blocks, through 64-bit addresses.
    Bytes are moved, not numbers: exact for every dtype. In place: a destination is never another row's source.
    """
    num_programs = tl.num_programs(0)
    count, row = num_reqs, 0
    if HAS_WORK_LIST:  # volatile: read beside the count, not put off until that is known
        count, row = tl.load(p_work_count), tl.load(p_work_list, volatile=True)
    unit, first_unit = tl.program_id(0), 0  # running numbers of this program's tile, and of the row's first
    for i in range(0, count):
        slot = row
        if HAS_IDX_MAPPING:
            slot = tl.load(p_idx_mapping + row)
        tile_meta = _tile_meta(p_state_meta, p_tile_state, unit - first_unit, num_tiles, CONV_STATE_DIM_FIRST)
        source_column = tl.load(p_source_column + slot, mask=slot >= 0, other=-1)
        dest_column = tl.load(p_dest_column + slot, mask=slot >= 0, other=0)
        token_bias = tl.load(p_token_bias + slot, mask=slot >= 0, other=0)
        row = i + 1
        if HAS_WORK_LIST:
            row = tl.load(p_work_list + row, mask=row < count, other=0)
        if source_column >= 0:
            unit, first_unit = _copy_mamba_states(
                tile_meta, p_block_table, num_groups, table_width, slot, source_column, dest_column, token_bias,
                unit, first_unit, p_state_meta, p_tile_state, p_tickets, num_tiles, num_conv_tiles, num_programs,
                COPY_BLOCK_SIZE, CONV_STATE_DIM_FIRST,
            )  # fmt: skip
    _return_tickets(p_tickets, unit, first_unit, num_programs)


def precopy_mamba_align_fused_reference(
    source_column: torch.Tensor,
    dest_column: torch.Tensor,
    token_bias: torch.Tensor,
    block_table: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    work_list: torch.Tensor | None,
    work_count: torch.Tensor | None,
    num_reqs: int,
    states: StateTable,
) -> None:
    """Move the states of every visited row whose `source_column` is not negative.

    source_column, dest_column, token_bias: int32, by batch row, or by slot with `idx_mapping`.
    block_table: int32 `[rows or slots, groups, columns]`. idx_mapping: int32 `[num_reqs]`, batch row -> slot, negative
    skips. work_list, work_count: the batch rows to visit and how many; None visits rows `0 .. num_reqs-1`.
    """
    rows = range(num_reqs) if work_list is None else work_list[: int(work_count)].tolist()
    for row in rows:
        slot = row if idx_mapping is None else int(idx_mapping[row])
        if slot < 0 or (source := int(source_column[slot])) < 0:
            continue
        dest, bias, table = int(dest_column[slot]), int(token_bias[slot]), block_table[slot].tolist()
        for meta in states.metas:
            columns = (table[meta.group], source, dest, bias)
            copy_mamba_state_block_reference(meta, *columns, states.conv_state_dim_first)


def precopy_mamba_align_fused(
    source_column: torch.Tensor,
    dest_column: torch.Tensor,
    token_bias: torch.Tensor,
    block_table: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    work_list: torch.Tensor | None,
    work_count: torch.Tensor | None,
    num_reqs: int,
    states: StateTable,
) -> None:
    """`precopy_mamba_align_fused_reference`, on the device: one launch, no synchronisation."""
    arguments = (source_column, dest_column, token_bias, block_table, idx_mapping, work_list, work_count, num_reqs)
    if not runs_kernel(block_table):
        return precopy_mamba_align_fused_reference(*arguments, states)
    _, num_groups, table_width = block_table.shape
    precopy_mamba_align_fused_kernel[(states.num_programs,)](
        *arguments,
        states.state_meta,
        states.tile_state,
        states.tickets,
        states.num_tiles,
        states.num_conv_tiles,
        num_groups,
        table_width,
        HAS_IDX_MAPPING=idx_mapping is not None,
        HAS_WORK_LIST=work_list is not None,
        COPY_BLOCK_SIZE=states.copy_block_size,
        CONV_STATE_DIM_FIRST=states.conv_state_dim_first,
        **LAUNCH_OPTIONS,
    )
