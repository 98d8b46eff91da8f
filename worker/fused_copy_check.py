"""Proof, while serving, that the fused pre-copy does what the scalar path would do.

For every row of a checked step: the decision (source column, destination column, bias, skip) that the fused path ran
with, read back from the device, against `mamba_columns.precopy` on the row's own numbers; and for every row that
moved, each state's bytes against what the scalar path's pointer list copies from the same sources. Where the scalar
path has no copy (a DS conv state shifted by more than 0), a plain torch slice takes its place. Bytes are compared as
bits, over the conv slots that are defined after the shift. Of a row that moves nothing, the blocks it goes on from
must keep their checksums. Checking reads the device back; serving without it does not.
"""

from collections import Counter
from dataclasses import dataclass
from math import gcd

import torch

from mambalign.kernels.batch_memcpy import batch_memcpy
from mambalign.kernels.mamba_state_table import describe_states
from mambalign.worker.mamba_columns import PrecopyInfo
from mambalign.worker.mamba_laws import RowBefore
from mambalign.worker.scalar_copy import MambaCopyList, collect_mamba_copy_meta
from mambalign.worker.state_cache import StateCache


@dataclass(frozen=True)
class Mismatch:
    """A row for which the fused path and the scalar path disagree."""

    request_id: str
    text: str


class FusedCopyChecker:
    """Checks a share `rate` of the steps of one runner; counts by token bias before the copy."""

    def __init__(self, cache: StateCache, rate: float = 1.0):
        self.cache = cache
        self.rate = rate
        self.checks: Counter[int] = Counter()  # rows and steps
        self.copies: Counter[int] = Counter()  # rows that moved bytes
        self.num_mismatches = 0
        states = cache.mamba_states()
        self._states = [state.tensor for state in states]
        self._metas = describe_states(states, cache.conv_layout == "DS")
        self._credit = 0.0

    def wants_step(self) -> bool:
        """Whether to check the next step: every one, or an even share of them."""
        self._credit += self.rate
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True

    def expect(self, rows: list[RowBefore]) -> "ExpectedCopies":
        """Decide and read what the scalar path would copy; call before the fused copy runs."""
        infos = [row.precopy(self.cache.mamba_block_tokens) for row in rows]
        states = [self._expected_bytes(row, info) for row, info in zip(rows, infos, strict=True)]
        return ExpectedCopies(rows, infos, states, self._resting_checksums(rows, infos))

    def _expected_bytes(self, row: RowBefore, info: PrecopyInfo) -> list[torch.Tensor]:
        """Per state, the bytes (or for a shifted DS conv state, the slots) that must lie in the destination block."""
        if info.source_column < 0:
            return []
        expected: list[torch.Tensor] = []
        for state, meta in zip(self._states, self._metas, strict=True):
            if self._is_shifted_ds(state, info):
                source = int(row.table_row[info.source_column])
                expected.append(state[source, :, info.token_bias :].clone())
                continue
            copies = MambaCopyList()
            collect_mamba_copy_meta(copies, [meta], self.cache.conv_layout, row.table_row, info)
            stays = not copies.sizes  # the source is the destination: not a byte of it may change
            dest = state[int(row.table_row[info.dest_column])]
            expected.append(bytes_of(dest).clone() if stays else self._copy_out(copies, state.device))
        return expected

    def _resting_checksums(self, rows: list[RowBefore], infos: list[PrecopyInfo]) -> torch.Tensor:
        """int64 `[rows, states]`, over each state's running block and live block; zeros for a row that moves."""
        blocks: dict[int, set[int]] = {}  # of each row
        for i, (row, info) in enumerate(zip(rows, infos, strict=True)):
            if info.source_column < 0:
                columns = (info.dest_column, info.dest_column + info.token_bias)
                blocks[i] = {int(row.table_row[column]) for column in columns}
        at_row = torch.tensor([i for i in blocks for _ in blocks[i]], dtype=torch.int64)
        block_ids = [block for i in blocks for block in blocks[i]]
        checksums = torch.zeros(len(rows), len(self._states), dtype=torch.int64)
        if block_ids:
            sums = torch.stack([block_checksums(state, block_ids) for state in self._states], dim=1)
            checksums.index_add_(0, at_row, sums.cpu())
        return checksums

    def _is_shifted_ds(self, state: torch.Tensor, info: PrecopyInfo) -> bool:
        is_conv = any(state is conv for conv in self.cache.conv)
        return is_conv and self.cache.conv_layout == "DS" and info.token_bias > 0

    def _copy_out(self, copies: MambaCopyList, device: torch.device) -> torch.Tensor:
        """Run a one-entry pointer list into memory of our own."""
        scratch = torch.empty(copies.sizes[0], dtype=torch.uint8, device=device)
        batch_memcpy(*torch.tensor([copies.sources, [scratch.data_ptr()], copies.sizes]).to(device))
        return scratch

    def check(self, expected: "ExpectedCopies", fused: list[PrecopyInfo]) -> list[Mismatch]:
        """Compare after the fused copy has run; `fused` are the decisions that it ran with, one a row."""
        mismatches = []
        rows, infos = expected.rows, expected.infos
        changed = (self._resting_checksums(rows, infos) != expected.checksums).any(dim=1).tolist()
        for row, want, states, got, spoiled in zip(rows, infos, expected.states, fused, changed, strict=True):
            bias = row.num_accepted - 1
            self.checks[bias] += 1
            self.copies[bias] += want.source_column >= 0
            problem = check_fused_copy_info(want, got) or self._check_bytes(row, want, states)
            if spoiled:
                problem = problem or "a state of a row that moves nothing has changed"
            if problem:
                mismatches.append(Mismatch(row.request_id, f"{problem}; expected {want}, fused {got}, row {row}"))
        self.num_mismatches += len(mismatches)
        return mismatches

    def _check_bytes(self, row: RowBefore, info: PrecopyInfo, states: list[torch.Tensor]) -> str | None:
        for index, (state, want) in enumerate(zip(self._states, states, strict=True) if states else ()):
            block = state[int(row.table_row[info.dest_column])]
            if want.dtype == torch.uint8:
                got = bytes_of(block)[: want.numel()]
            else:
                got, want = (t.contiguous().view(torch.uint8) for t in (block[:, : want.shape[-1]], want))
            if not torch.equal(got, want):
                return f"state {index}: {int((got != want).sum())} bytes differ from the scalar path's"
        return None


@dataclass(frozen=True)
class ExpectedCopies:
    """What a step's pre-copy must do, read before it ran; one entry a row."""

    rows: list[RowBefore]
    infos: list[PrecopyInfo]
    states: list[list[torch.Tensor]]  # none for a row that moves nothing
    checksums: torch.Tensor  # of the states of those rows


def bytes_of(block: torch.Tensor) -> torch.Tensor:
    """A block's bytes, uint8 `[bytes]`."""
    return block.contiguous().view(-1).view(torch.uint8)


def block_checksums(state: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
    """Sum of each block's bytes, eight or fewer taken as one integer: int64 `[len(block_ids)]`."""
    width = gcd(state[0].numel() * state.element_size(), 8)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    # A gather is one launch on a GPU; on a CPU it takes longer than the sums.
    parts = [state[block_ids]] if state.is_cuda else [state[block : block + 1] for block in block_ids]
    return torch.cat([part.flatten(1).view(integers).sum(1, dtype=torch.int64) for part in parts])


def check_fused_copy_info(expected: PrecopyInfo, fused: PrecopyInfo) -> str | None:
    """Compare a fused decision with the scalar one: None when equal, else what differs.

    A row that skips (source column -1) must skip in both; its destination, the running column, must agree too.
    """
    for field, want, got in zip(PrecopyInfo._fields, expected, fused, strict=True):
        if want != got:
            return f"{field} is {got} in the fused path and {want} in the scalar path"
    return None
