"""Drafts' inputs that lie in the places of their states: who leaves them, and who runs them again.

Faults planted in the rule and in the runner must be found by a row that is driven through random steps, as in
`test_migration_simulation`.
"""

from collections.abc import Callable

import pytest
import torch

from mambalign.kernels.step_addresses import state_blocks_reference
from mambalign.worker.tests import symbolic_runner
from mambalign.worker.tests.symbolic_driver import run_seeds
from mambalign.worker.tests.symbolic_memory import Inputs
from mambalign.worker.tests.symbolic_rows import Row
from mambalign.worker.tests.symbolic_runner import SymbolicRunner

NUM_FAULT_SEEDS = 1500
COPIED = "copied as a state"  # what a rule that is too wide ends in
Rule = Callable[[int, int, int], bool]  # may_defer


class AddressedRunner(SymbolicRunner):
    """Looks up what it does at the addresses that the kernels get."""

    def _forward_decode(self, row: Row) -> None:
        memory, states, batch, i = self.memory, row.text.states, self.batch, row.index
        offset = torch.arange(row.q)
        of_row = [row.q, row.scheduled.is_decode, row.n, batch.mamba_state_idx[i], batch.num_accepted[i]]
        state_block, _, temporal_block, _, deferral = state_blocks_reference(
            torch.zeros_like(offset),
            offset,
            torch.full_like(offset, -1),
            *torch.tensor([[int(number)] for number in of_row], dtype=torch.int32),
            torch.from_numpy(batch.mamba_block_table[i : i + 1]),
            self.limits.num_spec_tokens,
            self.limits.mamba_block_tokens,
        )
        first = row.n - int(deferral.num_replays)
        assert memory.temporal[int(temporal_block)] == states[first]
        replayed = deferral.replay_block[0, : int(deferral.num_replays)].tolist()
        assert [memory.temporal[block] for block in replayed] == [Inputs(s) for s in states[first + 1 : row.n + 1]]
        super()._forward_decode(row)
        left = [memory.temporal[block] for block in state_block.tolist()]
        behind = [Inputs(state) for state in row.fed[1:]] if deferral.is_deferring else row.fed[1:]
        assert left == [row.fed[0], *behind]


def test_addresses_are_those_of_the_rule() -> None:
    drivers = run_seeds(300, AddressedRunner)
    assert sum(driver.runner.num_replays for driver in drivers) > 300


def also_at(place: int) -> Rule:
    """The right rule, that takes one more place of a block."""
    right = symbolic_runner.may_defer
    return lambda n, block_tokens, spec: right(n, block_tokens, spec) or n % block_tokens == place


@pytest.mark.parametrize("num_spec_tokens", [1, 2, 3, 8])
def test_rule_takes_all_places_but_one(num_spec_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's last token could defer too, since the one copy owed is of its own state; any other place is wrong."""
    for block_tokens in (2 * num_spec_tokens + 1, 2 * num_spec_tokens + 2, 3 * num_spec_tokens + 3):
        drawn = {"num_spec_tokens": num_spec_tokens, "block_tokens": block_tokens}
        for place in range(block_tokens):
            if symbolic_runner.may_defer(place, block_tokens, num_spec_tokens):
                continue
            with monkeypatch.context() as patched:
                patched.setattr(symbolic_runner, "may_defer", also_at(place))
                if place == block_tokens - 1:
                    drivers = run_seeds(100, **drawn)
                    assert sum(driver.runner.num_replays for driver in drivers) > 0
                    continue
                with pytest.raises(AssertionError, match=COPIED):
                    run_seeds(NUM_FAULT_SEEDS, **drawn)


def looks_ahead(factor: int, more: int) -> Rule:
    """Looks `factor` S + `more` tokens ahead, where the right rule looks 2 S + 1."""
    return lambda n, block_tokens, spec: n // block_tokens == (n + factor * spec + more) // block_tokens


RULE_FAULTS: dict[str, Rule] = {
    "one token too far": looks_ahead(2, 0),
    "next step forgotten": looks_ahead(1, 1),
    "up to the boundary": looks_ahead(1, 0),
    "everywhere": lambda n, block_tokens, spec: True,
}


@pytest.mark.parametrize("fault", RULE_FAULTS)
def test_wrong_rule_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic_runner, "may_defer", RULE_FAULTS[fault])
    with pytest.raises(AssertionError, match=COPIED):
        run_seeds(NUM_FAULT_SEEDS)


class JudgesLastStepByThisOne(SymbolicRunner):
    def _has_deferred(self, row: Row) -> bool:
        return int(self.batch.num_accepted[row.index]) > 1 and self._may_defer(row.n)


class JudgesLastStepByItsDrafts(SymbolicRunner):
    """By where its first draft lies, from whose inputs on it deferred."""

    def _has_deferred(self, row: Row) -> bool:
        a = int(self.batch.num_accepted[row.index])
        return a > 1 and self._may_defer(row.n - a + 1)


class AlwaysReplays(SymbolicRunner):
    """Also drafts whose states were left."""

    def _has_deferred(self, row: Row) -> bool:
        return int(self.batch.num_accepted[row.index]) > 1


class NeverReplays(SymbolicRunner):
    """Takes what lies in the last draft's column for its state."""

    def _has_deferred(self, row: Row) -> bool:
        return False


class ReplaysOneLess(SymbolicRunner):
    def _num_replays(self, row: Row) -> int:
        return max(0, super()._num_replays(row) - 1)


class ReplaysOneMore(SymbolicRunner):
    """Also the first draft that was rejected."""

    def _num_replays(self, row: Row) -> int:
        num_replays = super()._num_replays(row)
        return num_replays and num_replays + 1


class ReplaysOnlyWhereItDefers(SymbolicRunner):
    def _num_replays(self, row: Row) -> int:
        return super()._num_replays(row) if self._may_defer(row.n) else 0


class DefersFirstToken(SymbolicRunner):
    def _forward_decode(self, row: Row) -> None:
        super()._forward_decode(row)
        if self._may_defer(row.n):
            running = self._block(row, int(self.batch.mamba_state_idx[row.index]))
            self.memory.temporal[running] = Inputs(row.fed[0])


class PrefillDefers(SymbolicRunner):
    def _forward_prefill(self, row: Row) -> None:
        super()._forward_prefill(row)
        if self._may_defer(row.n) and row.q > 1:
            running = self._block(row, int(self.batch.mamba_state_idx[row.index]))
            self.memory.temporal[running] = Inputs(row.fed[-1])


@pytest.mark.parametrize(
    "runner_class",
    [
        JudgesLastStepByThisOne,
        JudgesLastStepByItsDrafts,
        AlwaysReplays,
        NeverReplays,
        ReplaysOneLess,
        ReplaysOneMore,
        ReplaysOnlyWhereItDefers,
        DefersFirstToken,
        PrefillDefers,
    ],
)
def test_wrong_runner_is_found(runner_class: type[SymbolicRunner]) -> None:
    with pytest.raises(AssertionError):
        run_seeds(NUM_FAULT_SEEDS, runner_class)
