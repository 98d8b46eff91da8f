"""After sampling: keep the state at the block boundary that a decode row crossed, and note how many tokens stay."""

import torch

from mambalign.kernels.mamba_state_copy import StateMeta, copy_mamba_state_block_reference


def postprocess_mamba_fused_reference(
    num_kept: torch.Tensor,
    num_computed: torch.Tensor,
    running_column: torch.Tensor,
    num_accepted: torch.Tensor,
    block_table: torch.Tensor,
    idx_mapping: torch.Tensor | None,
    num_reqs: int,
    block_tokens: int,
    state_meta: torch.Tensor,
    tile_state: torch.Tensor,
    conv_state_dim_first: bool,
    copy_block_size: int = 0,
    num_programs: int = 0,
) -> None:
    """Decide and copy; writes `num_accepted`, which may not share memory with an input.

    num_kept: int32 by batch row, tokens kept by a decode row, 0 for a prefill row. The others as in
    `precopy_mamba_align_fused`; num_computed is the row's count before the step.
    """
    metas = [StateMeta(*fields) for fields in state_meta.tolist()]
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
            for meta in metas:
                copy_mamba_state_block_reference(
                    meta, table[meta.group], column, dest, bias, conv_state_dim_first
                )


postprocess_mamba_fused = postprocess_mamba_fused_reference
