"""What the fused kernels of state migration are launched with: metadata of every state, and buffers on the device."""

import torch

from mambalign.kernels.mamba_state_table import MambaState, StateTable
from mambalign.kernels.postprocess_mamba import postprocess_mamba_fused
from mambalign.kernels.precopy_mamba_align import precopy_mamba_align_fused
from mambalign.worker.cpu_gpu_buffer import CpuGpuBuffer
from mambalign.worker.mamba_columns import NULL_BLOCK, PrecopyInfo
from mambalign.worker.state_cache import StateCache


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
        self.states = cache.mamba_states() if states is None else states
        devices = {state.tensor.device for state in self.states}
        if len(devices) != 1:
            raise ValueError(f"states must lie on one device, got {sorted(map(str, devices)) or 'none'}")
        if cache.conv_layout not in ("SD", "DS"):
            raise ValueError(f"conv layout {cache.conv_layout!r} is neither SD nor DS")
        self.device = devices.pop()
        self.cache = cache
        self.block_tokens = cache.mamba_block_tokens
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
