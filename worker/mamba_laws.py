"""The laws of state migration (DESIGN section 2) that a wrong schedule would break, as assertions of checked mode."""

from typing import NamedTuple

import numpy as np

from mambalign.worker.batch import ScheduledRow
from mambalign.worker.mamba_columns import NULL_BLOCK, PrecopyInfo, precopy
from mambalign.worker.state_cache import StateCache


class RowBefore(NamedTuple):
    """One row's own numbers, before a step's decisions."""

    request_id: str
    running_column: int
    num_computed_tokens: int  # n
    num_tokens: int  # q
    num_accepted: int
    table_row: np.ndarray  # int32 [columns], block ids

    def precopy(self, block_tokens: int) -> PrecopyInfo:
        return precopy(self.running_column, self.num_computed_tokens, self.num_tokens, self.num_accepted, block_tokens)


def check_prefills(rows: list[ScheduledRow], infos: list[PrecopyInfo]) -> None:
    """A prefill row's last step counts as one token: nothing shifts."""
    for scheduled, info in zip(rows, infos, strict=True):
        assert scheduled.is_decode or info.token_bias == 0, f"{scheduled.request_id} prefills with {info}"


def check_rows(rows: list[RowBefore], infos: list[PrecopyInfo], cache: StateCache) -> None:
    """Before a step: accepted counts in range, and moves as in `check_moves`."""
    for row in rows:
        check_accepted(row.request_id, row.num_accepted, cache)
    decided = zip(rows, infos, strict=True)
    check_moves([(row.request_id, row.table_row, info) for row, info in decided if info.source_column >= 0])


def check_accepted(name: str, num_accepted: int, cache: StateCache) -> None:
    """A row keeps at least one token of a step, and at most its drafts and one."""
    assert 1 <= num_accepted <= cache.num_spec_tokens + 1, f"row {name}: num_accepted {num_accepted} is not in 1..S+1"


def check_moves(moves: list[tuple[str, np.ndarray, PrecopyInfo]]) -> None:
    """Columns in range, named blocks real, and no row writes what another reads or writes.

    A move: the row's name, its block ids, its decision.
    """
    readers: dict[int, set[str]] = {}
    writers: dict[int, str] = {}
    for name, table_row, (source, dest, bias) in moves:
        columns = (source, source + bias, dest)
        assert min(columns) >= 0 and max(columns) < len(table_row), f"row {name}: {columns} leave the block table"
        blocks = table_row[list(columns)].tolist()
        assert NULL_BLOCK not in blocks, f"row {name}: a column of {columns} has no block: {blocks}"
        for block in blocks[:2]:
            readers.setdefault(block, set()).add(name)
        assert writers.setdefault(blocks[2], name) == name, f"rows {writers[blocks[2]]} and {name} write one block"
    for block, name in writers.items():
        others = readers.get(block, set()) - {name}
        assert not others, f"row {name} writes block {block}, which rows {sorted(others)} read"
