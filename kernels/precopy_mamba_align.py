"""Before the forward pass: every state of the rows whose running column moves, one launch for all of them."""

import torch

from mambalign.kernels.mamba_state_copy import StateMeta, copy_mamba_state_block_reference


def precopy_mamba_align_fused_reference(
    source_column: torch.Tensor,
    dest_column: torch.Tensor,
    token_bias: torch.Tensor,
    block_table: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    work_list: torch.Tensor | None,
    work_count: torch.Tensor | None,
    num_reqs: int,
    state_meta: torch.Tensor,
    tile_state: torch.Tensor,
    conv_state_dim_first: bool,
    copy_block_size: int = 0,
    num_programs: int = 0,
) -> None:
    """Move the states of every visited row whose `source_column` is not negative.

    source_column, dest_column, token_bias: int32, by batch row, or by slot with `idx_mapping`.
    block_table: int32 `[rows or slots, groups, columns]`. idx_mapping: int32 `[num_reqs]`, batch row -> slot, negative
    skips. work_list, work_count: the batch rows to visit and how many; None visits rows `0 .. num_reqs-1`.
    state_meta: int64 `[states, fields of StateMeta]`; tile_state: int32 `[tiles]`.
    """
    rows = range(num_reqs) if work_list is None else work_list[: int(work_count)].tolist()
    metas = [StateMeta(*fields) for fields in state_meta.tolist()]
    for row in rows:
        slot = row if idx_mapping is None else int(idx_mapping[row])
        if slot < 0 or (source := int(source_column[slot])) < 0:
            continue
        dest, bias, table = int(dest_column[slot]), int(token_bias[slot]), block_table[slot].tolist()
        for meta in metas:
            copy_mamba_state_block_reference(meta, table[meta.group], source, dest, bias, conv_state_dim_first)


precopy_mamba_align_fused = precopy_mamba_align_fused_reference
