"""Column logic alone: one row is driven through random steps, and the symbolic runner says if a state went astray.

Faults planted in the rules, in the runner and in the driver must be found: a test of the oracle itself.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from mambalign.worker import mamba_columns
from mambalign.worker.batch import NewRow
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import PrecopyInfo, cdiv
from mambalign.worker.tests import symbolic_runner
from mambalign.worker.tests.symbolic_driver import Driver, run_seeds
from mambalign.worker.tests.symbolic_memory import ZERO
from mambalign.worker.tests.symbolic_rows import Row
from mambalign.worker.tests.symbolic_runner import SymbolicRunner

NUM_SEEDS = 3000
NUM_FAULT_SEEDS = 1500


def test_no_state_goes_astray() -> None:
    drivers = run_seeds(NUM_SEEDS)
    assert {d.limits.num_spec_tokens for d in drivers} == set(range(9))
    assert sum(d.runner.num_biased_precopies for d in drivers) > NUM_SEEDS / 2
    assert sum(d.runner.num_postcopies for d in drivers) > NUM_SEEDS
    assert sum(d.num_by_chunk for d in drivers) > NUM_SEEDS and sum(d.num_replayed for d in drivers) > NUM_SEEDS / 10
    assert sum(d.runner.num_replays for d in drivers) > NUM_SEEDS
    turns = sum((d.runner.turns for d in drivers), Counter())
    assert len(turns) == 4 and min(turns.values()) > NUM_SEEDS / 4, turns


@pytest.mark.parametrize("num_spec_tokens", [0, 1, 3, 8])
def test_table_is_wide_enough(num_spec_tokens: int) -> None:
    """Drafts are scheduled up to the very end here: the widest row still fits."""
    for driver in run_seeds(200, num_spec_tokens=num_spec_tokens):
        limits = driver.limits
        width = mamba_columns.table_width(limits.max_model_len, limits.mamba_block_tokens, num_spec_tokens)
        assert driver.max_column < width


@pytest.mark.parametrize("num_spec_tokens", [1, 2, 3, 5, 8])
def test_block_of_s_tokens_is_too_small(num_spec_tokens: int) -> None:
    """Law 8 is tight: with B = S a step can cross two boundaries."""
    with pytest.raises(AssertionError):
        run_seeds(NUM_FAULT_SEEDS, num_spec_tokens=num_spec_tokens, block_tokens=num_spec_tokens)
    run_seeds(100, num_spec_tokens=num_spec_tokens, block_tokens=num_spec_tokens + 1)


# Faults in the column rules: (module, name, wrong function of the right one)


def biased_precopy(by: int) -> Callable:
    def wrap(right: Callable) -> Callable:
        def wrong(c: int, n: int, q: int, a: int, block_tokens: int) -> PrecopyInfo:
            info = right(c, n, q, a, block_tokens)
            return info._replace(token_bias=max(0, info.token_bias + by))

        return wrong

    return wrap


def biased_postcopy(by: int) -> Callable:
    def wrap(right: Callable) -> Callable:
        def wrong(c: int, n: int, num_kept: int, block_tokens: int):
            info = right(c, n, num_kept, block_tokens)
            return info and info._replace(token_bias=max(0, info.token_bias + by))

        return wrong

    return wrap


def postcopy_source_after_floor(right: Callable) -> Callable:
    """Takes the running column for the one that n lies in, which it is not after rejected drafts."""
    return lambda c, n, num_kept, block_tokens: right(cdiv(n + num_kept, block_tokens) - 1, n, num_kept, block_tokens)


def postcopy_only_inside(right: Callable) -> Callable:
    """Forgets the run that ends exactly on the boundary."""

    def wrong(c: int, n: int, num_kept: int, block_tokens: int):
        return None if (n + num_kept) % block_tokens == 0 else right(c, n, num_kept, block_tokens)

    return wrong


def one_spec_column_less(right: Callable) -> Callable:
    return lambda n, c, q, block_tokens, spec: right(n, c, q, block_tokens, spec - 1)


def column_may_move_back(right: Callable) -> Callable:
    return lambda c, n, q, block_tokens: cdiv(n + q, block_tokens) - 1


RULE_FAULTS = {
    "bias one too high": (symbolic_runner, "precopy", biased_precopy(1)),
    "bias one too low": (symbolic_runner, "precopy", biased_precopy(-1)),
    "boundary one token late": (symbolic_runner, "postcopy", biased_postcopy(1)),
    "boundary one token early": (symbolic_runner, "postcopy", biased_postcopy(-1)),
    "boundary from the column of n": (symbolic_runner, "postcopy", postcopy_source_after_floor),
    "run that ends on the boundary": (symbolic_runner, "postcopy", postcopy_only_inside),
    "one spec column less": (mamba_columns, "decode_columns", one_spec_column_less),
    "column moves back": (mamba_columns, "next_column", column_may_move_back),
}


@pytest.mark.parametrize("fault", RULE_FAULTS)
def test_wrong_rule_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, wrap = RULE_FAULTS[fault]
    monkeypatch.setattr(module, name, wrap(getattr(module, name)))
    with pytest.raises(AssertionError):
        run_seeds(NUM_FAULT_SEEDS)


# Faults in what a runner does with right decisions


class NoResetAfterMove(SymbolicRunner):
    def _moved(self, row: Row) -> None:
        pass


class ConvNotShifted(SymbolicRunner):
    def _copy(self, temporal_source: int, conv_source: int, dest: int, shift: int) -> None:
        super()._copy(temporal_source, conv_source, dest, 0)


class TemporalFromRunningColumn(SymbolicRunner):
    def _copy(self, temporal_source: int, conv_source: int, dest: int, shift: int) -> None:
        super()._copy(conv_source, conv_source, dest, shift)


class CarryNotCopied(SymbolicRunner):
    def _copy(self, temporal_source: int, conv_source: int, dest: int, shift: int) -> None:
        carry = self.memory.carry[dest]
        super()._copy(temporal_source, conv_source, dest, shift)
        self.memory.carry[dest] = carry


class BoundaryWindowFromZeros(SymbolicRunner):
    """Boundary closer than W-1 tokens to the chunk's start: the old window is forgotten."""

    def _forward_prefill(self, row: Row) -> None:
        super()._forward_prefill(row)
        running = int(self.batch.mamba_state_idx[row.index])
        for m in row.scheduled.boundaries:
            missing = self.limits.conv_width - 1 - (m - row.n)
            column = m // self.limits.mamba_block_tokens - 1
            if column != running and missing > 0:
                self.memory.conv[row.scheduled.mamba_blocks[column]][:missing] = [ZERO] * missing


class DrafterSkipsPlainRows(SymbolicRunner):
    """Fills the drafter's slots only when drafts are wanted: published KV has holes."""

    def _fill_drafter(self, row: Row) -> None:
        if row.scheduled.samples:
            super()._fill_drafter(row)


class DecodeByLength(SymbolicRunner):
    """Takes every row of one token for a decode row that leaves its conv inputs the decode way."""

    def _forward_prefill(self, row: Row) -> None:
        if row.q > 1 or row.n == 0:
            super()._forward_prefill(row)
            return
        running = self._block(row, int(self.batch.mamba_state_idx[row.index]))
        row.carry = self.memory.carry[running]
        self._forward_decode(row)
        self.memory.temporal[running] = row.text.states[row.n]


@pytest.mark.parametrize(
    "runner_class",
    [
        NoResetAfterMove,
        ConvNotShifted,
        TemporalFromRunningColumn,
        CarryNotCopied,
        BoundaryWindowFromZeros,
        DrafterSkipsPlainRows,
        DecodeByLength,
    ],
)
def test_wrong_runner_is_found(runner_class: type[SymbolicRunner]) -> None:
    with pytest.raises(AssertionError):
        run_seeds(NUM_FAULT_SEEDS, runner_class)


def test_count_kept_over_preemption_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = InputBatch.add

    def wrong(batch: InputBatch, new: NewRow) -> None:
        old = int(batch.num_accepted[batch.num_reqs])
        right(batch, new)
        batch.num_accepted[batch.num_reqs - 1] = old

    monkeypatch.setattr(InputBatch, "add", wrong)
    with pytest.raises(AssertionError):
        run_seeds(NUM_FAULT_SEEDS)


# Faults in what the driver holds


class FreesRunningColumn(Driver):
    def is_behind(self, column: int) -> bool:
        return column < self.n // self.limits.mamba_block_tokens


class FreesSourceTooEarly(Driver):
    def columns(self, q: int) -> set[int]:
        columns = super().columns(q)
        if self.c not in columns:
            self.release(self.c)
        return columns


class KeepsEverything(Driver):
    def is_behind(self, column: int) -> bool:
        return False


@pytest.mark.parametrize("driver_class", [FreesRunningColumn, FreesSourceTooEarly, KeepsEverything])
def test_wrong_holder_is_found(driver_class: type[Driver]) -> None:
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run_seeds(NUM_FAULT_SEEDS, driver_class=driver_class)


# Faults in how it cuts a text that is scanned by chunks


class CutsInsideAChunk(Driver):
    def piece_end(self, most: int) -> int:
        return min(self.num_prompt_tokens, self.n + most) if self.by_chunk else self.n + most


class RunsReplyWithPrompt(Driver):
    """A reply that is run again after a restart: its first tokens end a chunk of the prompt's."""

    def piece_end(self, most: int) -> int:
        chunk = self.limits.chunk_tokens or 1
        return self.n + cdiv(most, chunk) * chunk


@pytest.mark.parametrize("driver_class", [CutsInsideAChunk, RunsReplyWithPrompt])
def test_wrong_cut_is_found(driver_class: type[Driver]) -> None:
    with pytest.raises(AssertionError):
        run_seeds(NUM_FAULT_SEEDS, driver_class=driver_class)
