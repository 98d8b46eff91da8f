"""After sampling: keep the state at the block boundary that a decode row crossed, and note how many tokens stay."""

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
def postprocess_mamba_fused_kernel(
    p_num_kept,
    p_num_computed,
    p_running_column,
    p_num_accepted,
    p_block_table,
    p_idx_mapping,
    num_reqs,
    block_tokens,
    p_state_meta,
    p_tile_state,
    p_tickets,
    num_tiles,
    num_conv_tiles,
    num_groups,
    table_width,
    ROWS: tl.constexpr,
    HAS_IDX_MAPPING: tl.constexpr,
    COPY_BLOCK_SIZE: tl.constexpr,
    CONV_STATE_DIM_FIRST: tl.constexpr,
):
    """m = (n + kept) // B * B; if m > n the state after m tokens -> block[m/B - 1]; num_accepted = kept, or 1 at m.

    Grid: any fixed number of programs. Each decides for all rows; program 0 owns the counts, program p tile p of all
    moving rows' tiles, then whichever its tickets name.
    Reads counts, block tables, metadata and source blocks; writes num_accepted and destination blocks.
    Bytes are moved, not numbers. In place: an SD or DS conv state may shift within its own block.
    """
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    rows = tl.arange(0, ROWS)
    slots, live = rows, rows < num_reqs
    if HAS_IDX_MAPPING:
        slots = tl.load(p_idx_mapping + rows, mask=live, other=-1)
        live = slots >= 0
    kept = tl.load(p_num_kept + rows, mask=live, other=0)
    n = tl.load(p_num_computed + slots, mask=live, other=0)
    running = tl.load(p_running_column + slots, mask=live, other=0)
    boundary = (n + kept) // block_tokens * block_tokens
    crosses = (kept > 0) & (boundary > n)
    dest, bias = boundary // block_tokens - 1, boundary - n - 1
    ends_there = crosses & (dest == running)
    if i_program == 0:
        tl.store(p_num_accepted + slots, tl.where((kept > 0) & ~ends_there, kept, 1), mask=live)

    moves = crosses & ~(ends_there & (bias == 0))
    order = tl.cumsum(moves.to(tl.int32), 0) - 1
    unit, first_unit = i_program, 0
    for i in range(0, tl.sum(moves.to(tl.int32), 0)):
        tile_meta = _tile_meta(p_state_meta, p_tile_state, unit - first_unit, num_tiles, CONV_STATE_DIM_FIRST)
        here = moves & (order == i)
        slot = tl.sum(tl.where(here, slots, 0), 0)
        source_column = tl.sum(tl.where(here, running, 0), 0)
        dest_column = tl.sum(tl.where(here, dest, 0), 0)
        token_bias = tl.sum(tl.where(here, bias, 0), 0)
        unit, first_unit = _copy_mamba_states(
            tile_meta, p_block_table, num_groups, table_width, slot, source_column, dest_column, token_bias,
            unit, first_unit, p_state_meta, p_tile_state, p_tickets, num_tiles, num_conv_tiles, num_programs,
            COPY_BLOCK_SIZE, CONV_STATE_DIM_FIRST,
        )  # fmt: skip
    _return_tickets(p_tickets, unit, first_unit, num_programs)


def postprocess_mamba_fused_reference(
    num_kept: torch.Tensor,
    num_computed: torch.Tensor,
    running_column: torch.Tensor,
    num_accepted: torch.Tensor,
    block_table: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    num_reqs: int,
    block_tokens: int,
    states: StateTable,
) -> None:
    """Decide and copy; writes `num_accepted`, which may not share memory with an input.

    num_kept: int32 by batch row, tokens kept by a decode row, 0 for a prefill row. The others as in
    `precopy_mamba_align_fused`; num_computed is the row's count before the step.
    """
    for row in range(num_reqs):
        slot = row if idx_mapping is None else int(idx_mapping[row])
        if slot < 0:
            continue
        kept, n, column = int(num_kept[row]), int(num_computed[slot]), int(running_column[slot])
        boundary = (n + kept) // block_tokens * block_tokens
        crosses = kept > 0 and boundary > n
        dest, bias = boundary // block_tokens - 1, boundary - n - 1
        num_accepted[slot] = 1 if kept == 0 or (crosses and dest == column) else kept
        if crosses:
            table = block_table[slot].tolist()
            for meta in states.metas:
                columns = (table[meta.group], column, dest, bias)
                copy_mamba_state_block_reference(meta, *columns, states.conv_state_dim_first)


def postprocess_mamba_fused(
    num_kept: torch.Tensor,
    num_computed: torch.Tensor,
    running_column: torch.Tensor,
    num_accepted: torch.Tensor,
    block_table: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    num_reqs: int,
    block_tokens: int,
    states: StateTable,
) -> None:
    """`postprocess_mamba_fused_reference`, on the device: one launch, no synchronisation."""
    arguments = (num_kept, num_computed, running_column, num_accepted, block_table, idx_mapping, num_reqs)
    if not runs_kernel(block_table):
        return postprocess_mamba_fused_reference(*arguments, block_tokens, states)
    _, num_groups, table_width = block_table.shape
    postprocess_mamba_fused_kernel[(states.num_programs,)](
        *arguments,
        block_tokens,
        states.state_meta,
        states.tile_state,
        states.tickets,
        states.num_tiles,
        states.num_conv_tiles,
        num_groups,
        table_width,
        ROWS=triton.next_power_of_2(num_accepted.shape[0]),
        HAS_IDX_MAPPING=idx_mapping is not None,
        COPY_BLOCK_SIZE=states.copy_block_size,
        CONV_STATE_DIM_FIRST=states.conv_state_dim_first,
        **LAUNCH_OPTIONS,
    )
