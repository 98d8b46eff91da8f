"""The V2 runner's requests: each keeps one slot, a fixed row of device memory, for as long as it runs.

Everything that changes from step to step lives on the device, so that a step can be launched before the last one's
results are known. Slots are int32 unless said otherwise; a slot's numbers are rewritten when a request enters it.
"""

import torch

from mambalign.kernels.scatter_rows import scatter_rows
from mambalign.worker.batch import NewRow, ScheduledRow
from mambalign.worker.forward_batch import NO_TOKEN
from mambalign.worker.host_copy import to_device
from mambalign.worker.input_batch import CachedRequest
from mambalign.worker.mamba_columns import first_column, postcopy
from mambalign.worker.mamba_laws import RowBefore, check_accepted, check_moves
from mambalign.worker.mamba_utils import MambaSpecDecodeGPUContext


class SlotBatch:
    """`max_num_reqs` slots. Running columns and accepted counts are the migration context's own tensors."""

    def __init__(self, align_ctx: MambaSpecDecodeGPUContext, max_num_reqs: int, num_spec_tokens: int, max_len: int):
        """`max_len`: longest text in tokens, for the token history; 0 keeps none."""
        device = align_ctx.device
        self.align_ctx = align_ctx
        self.running_column = align_ctx.mamba_state_idx_buf.gpu
        self.num_accepted = align_ctx.num_accepted
        self.num_computed = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.next_token = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.drafts = torch.full((max_num_reqs, num_spec_tokens), NO_TOKEN, dtype=torch.int64, device=device)
        self.history = torch.full((max_num_reqs, max_len), NO_TOKEN, dtype=torch.int64, device=device)
        self.requests: list[CachedRequest | None] = [None] * max_num_reqs
        self.slot_of: dict[str, int] = {}
        self.precopy_totals = torch.zeros(2, dtype=torch.int64, device=device)  # rows moved, of those with a bias > 0
        self.num_postcopies = torch.zeros((), dtype=torch.int64, device=device)  # rows that crossed a boundary
        self._last_scheduled: tuple[list[int], torch.Tensor | None] = ([], None)
        self._free = list(range(max_num_reqs - 1, -1, -1))

    def add(self, new: NewRow) -> None:
        """Give a request a slot; its state is the checkpoint that it resumes from, if any."""
        assert new.request_id not in self.slot_of, f"{new.request_id} has a slot already"
        slot = self._free.pop()
        self.slot_of[new.request_id] = slot
        self.requests[slot] = CachedRequest.from_new_row(new)
        column = first_column(new.num_computed_tokens, self.align_ctx.block_tokens)
        self.num_accepted[slot].fill_(1)  # an assignment would copy a host value, and wait
        self.num_computed[slot].fill_(new.num_computed_tokens)
        self.running_column[slot].fill_(column)
        self.drafts[slot].fill_(NO_TOKEN)
        if self.history.shape[1]:
            self.history[slot, : len(new.token_ids)] = to_device(new.token_ids, torch.int64, self.history.device)

    def remove(self, request_id: str) -> None:
        """Free a slot. Steps already launched still use it; what reuses it is launched after them."""
        slot = self.slot_of.pop(request_id)
        self.requests[slot] = None
        self._free.append(slot)

    def set_block_tables(self, slots: torch.Tensor, tables: torch.Tensor) -> None:
        """Write the columns that each row holds, int32 [R, columns], into its slot's block table (group 0)."""
        scatter_rows(tables, self.align_ctx.block_table_buf.gpu[:, 0], slots)

    def send_num_scheduled(self, num_scheduled: list[int]) -> torch.Tensor:
        """Tokens of each row, int32 by batch row; sent when they change, which decode rows seldom do."""
        if self._last_scheduled[0] != num_scheduled:
            self._last_scheduled = (num_scheduled, to_device(num_scheduled, torch.int32, self.align_ctx.device))
        return self._last_scheduled[1]

    def rows_before(self, rows: list[ScheduledRow], idx_mapping: torch.Tensor) -> list[RowBefore]:
        """What a step starts from, one a scheduled row, read back from the device. `idx_mapping` int32: row -> slot."""
        slots = idx_mapping.long()
        device = (self.running_column, self.num_computed, self.num_accepted)
        columns, computed, accepted = (tensor[slots].tolist() for tensor in device)
        tables = self.align_ctx.block_table_buf.gpu[slots, 0].cpu().numpy()
        return [
            RowBefore(row.request_id, columns[i], computed[i], row.num_tokens, accepted[i], tables[i])
            for i, row in enumerate(rows)
        ]

    def check_kept(self, num_kept: torch.Tensor, idx_mapping: torch.Tensor) -> None:
        """Before boundaries are kept: assert what a wrong schedule would break, on counts read back from the device.

        num_kept int32 by batch row, as in `postprocess_mamba_fused`.
        """
        ctx = self.align_ctx
        tables = ctx.block_table_buf.gpu[:, 0].cpu().numpy()
        columns, n, moves = self.running_column.tolist(), self.num_computed.tolist(), []
        for slot, kept in zip(idx_mapping.tolist(), num_kept.tolist(), strict=True):
            if slot >= 0 and kept:
                check_accepted(f"in slot {slot}", kept, ctx.cache)
                crossed = postcopy(columns[slot], n[slot], kept, ctx.block_tokens)
                if crossed is not None and crossed.move is not None:
                    moves.append((f"in slot {slot}", tables[slot], crossed.move))
        check_moves(moves)
