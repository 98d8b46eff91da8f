"""Column logic alone: one row is driven through random steps, and the symbolic runner says if a state went astray.

The driver does the least that a scheduler must: it holds exactly the columns that DESIGN section 2 grants, from a pool
of exactly the smallest size. Faults planted in the rules must be found: a test of the oracle itself.
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from mambalign.worker import mamba_columns
from mambalign.worker.batch import NewRow, ScheduledRow, SchedulerOutput
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import PrecopyInfo, cdiv
from mambalign.worker.sampling_params import SamplingParams
from mambalign.worker.tests import symbolic_runner
from mambalign.worker.tests.symbolic_memory import ZERO, Inputs, SymbolicLimits, true_text
from mambalign.worker.tests.symbolic_runner import Row, SymbolicRunner

NUM_SEEDS = 3000
NUM_FAULT_SEEDS = 1500
PARAMS = SamplingParams(max_tokens=1000, seed=0)


def draw_limits(rng: random.Random, num_spec_tokens: int | None = None, block_tokens: int | None = None):
    spec = rng.randint(0, 8) if num_spec_tokens is None else num_spec_tokens
    tight = [spec + 1, spec + 1, spec + 2, spec + 3, 2 * spec + 2]
    roomy = [rng.randint(2 * spec + 2, 4 * spec + 6)] * 3  # where rows defer
    block = rng.choice(tight + roomy) if block_tokens is None else block_tokens
    max_len = rng.randint(2 * block, 4 * block + 12)
    lookahead = rng.choice([0, max(1, spec)])
    chunks = [size for size in range(2, block + 1) if block % size == 0]
    return SymbolicLimits(
        max_num_seqs=1,
        max_model_len=max_len,
        num_spec_tokens=spec,
        conv_width=rng.randint(2, 4),
        kv_block_tokens=block,
        mamba_block_tokens=block,
        num_kv_blocks=1 + cdiv(max_len + 2 * spec + 1, block),
        num_mamba_blocks=2 + max(spec + 2, 5),  # the null block, and one for a checkpoint to resume from
        num_lookahead_tokens=lookahead,
        chunk_tokens=rng.choice([None, None, *chunks]),
    )


class Driver:
    """One row's life, with preemptions and restarts from the last checkpoint."""

    def __init__(self, rng: random.Random, limits: SymbolicLimits, runner_class: type[SymbolicRunner] = SymbolicRunner):
        self.rng, self.limits = rng, limits
        self.runner = runner_class(limits, lambda request_id, num_tokens: self.plan_drafts())
        self.free = list(range(1, limits.num_mamba_blocks))
        self.kv_blocks = list(range(1, limits.num_kv_blocks))
        self.tokens = [rng.randrange(3) for _ in range(rng.randint(1, limits.max_model_len - 1))]
        self.num_prompt_tokens = len(self.tokens)
        self.checkpoint: tuple[int, int] | None = None  # boundary, block
        self.max_column = self.num_by_chunk = self.num_replayed = 0
        self.held: dict[int, int] = {}
        self.is_in_runner = False

    def plan_drafts(self) -> tuple[int, int]:
        num_drafts = self.rng.choice([self.limits.num_spec_tokens, self.rng.randint(0, self.limits.num_spec_tokens)])
        return num_drafts, self.rng.choice([num_drafts, self.rng.randint(0, num_drafts)])

    def run(self) -> None:
        self.admit()
        while len(self.tokens) < self.limits.max_model_len:
            self.step()
            if self.rng.random() < 0.05:
                self.admit()
        prompt, chunk = self.tokens[: self.num_prompt_tokens], self.limits.chunk_tokens
        expected = true_text(prompt, PARAMS, 0, 3, len(self.tokens), chunk)
        assert self.tokens[self.num_prompt_tokens :] == expected[: len(self.tokens) - self.num_prompt_tokens]
        self.runner.check_sealed()

    def admit(self) -> None:
        """Start over, from the checkpoint if there is one behind which a token is left to compute."""
        size = self.limits.mamba_block_tokens
        for column in list(self.held):
            self.release(column)
        self.n, self.c, self.drafts = 0, -1, []
        self.num_admitted = len(self.tokens)
        if self.checkpoint and self.checkpoint[0] < len(self.tokens) and self.rng.random() < 0.7:
            self.n = self.checkpoint[0]
            self.c = self.n // size - 1
            self.held[self.c] = self.checkpoint[1]
        elif self.checkpoint:  # its KV is written over
            self.free.append(self.checkpoint[1])
            self.checkpoint = None
        for block in self.kv_blocks[self.n // size :]:
            self.runner.allocated_kv(block)
        new = NewRow("r", PARAMS, 0, self.num_prompt_tokens, list(self.tokens), self.n)
        self.output = SchedulerOutput([], [new], ["r"] if self.is_in_runner else [])
        self.is_in_runner = True

    def release(self, column: int) -> None:
        block = self.held.pop(column)
        if self.checkpoint is None or self.checkpoint[1] != block:
            self.free.append(block)

    def columns(self, q: int) -> set[int]:
        """What a decode row of q tokens must hold."""
        size, spec = self.limits.mamba_block_tokens, self.limits.num_spec_tokens
        return set(mamba_columns.decode_columns(self.n, self.c, q, size, spec))

    @property
    def by_chunk(self) -> bool:
        return self.limits.chunk_tokens is not None and self.n < self.num_prompt_tokens

    @property
    def may_keep(self) -> bool:
        """With chunks, nothing that covers a token of the reply is kept."""
        return self.limits.chunk_tokens is None or self.n < self.num_prompt_tokens

    def piece_end(self, most: int) -> int:
        """By chunks a piece ends with one, or with the prompt."""
        chunk = self.limits.chunk_tokens
        return min(self.num_prompt_tokens, self.n + cdiv(most, chunk) * chunk) if self.by_chunk else self.n + most

    def step(self) -> None:
        size, rng, known = self.limits.mamba_block_tokens, self.rng, len(self.tokens)
        is_decode = self.n == known - 1 and self.n >= self.num_admitted
        boundaries: list[int] = []
        if is_decode:
            tokens = [self.tokens[-1], *self.drafts]
            columns = self.columns(len(tokens))
        else:
            tokens = self.tokens[self.n : self.piece_end(rng.choice([1, rng.randint(1, size), known]))]
            self.num_by_chunk += self.by_chunk
            self.num_replayed += not self.may_keep
            possible = [m for m in range(size, self.n + len(tokens) + 1, size) if m > self.n]
            boundaries = sorted(rng.sample(possible, rng.randint(0, min(3, len(possible))) * self.may_keep))
            columns = {m // size - 1 for m in boundaries}
            columns.add(mamba_columns.next_column(self.c, self.n, len(tokens), size))
        for column in sorted(columns - set(self.held)):
            self.held[column] = self.free.pop(0)
            self.runner.allocated_state(self.held[column])
        self.max_column = max(self.max_column, *self.held)
        end = self.n + len(tokens)
        after = self.tokens[end] if end < known and not is_decode else None
        held = dict(self.held)
        row = ScheduledRow("r", 0, self.n, tokens, is_decode, self.kv_blocks, held, boundaries, after, self.by_chunk)
        self.output.rows.append(row)
        self.book(row)

    def book(self, row: ScheduledRow) -> None:
        size = self.limits.mamba_block_tokens
        (result,) = self.runner.execute_model(self.output).results
        self.output = SchedulerOutput([])
        self.c = mamba_columns.next_column(self.c, self.n, row.num_tokens, size)
        self.n += len(result.token_ids) if row.is_decode else row.num_tokens
        self.tokens += result.token_ids
        self.drafts = result.draft_token_ids
        last = self.n // size * size
        crossed = [last] if row.is_decode and self.may_keep and last > row.num_computed_tokens else []
        for boundary in row.boundaries + crossed:
            self.keep(boundary)
        for column in [k for k in self.held if self.is_behind(k)]:
            self.release(column)

    def is_behind(self, column: int) -> bool:
        return column < self.n // self.limits.mamba_block_tokens and column != self.c

    def keep(self, boundary: int) -> None:
        """Publish a boundary's state, in place of the checkpoint before."""
        block = self.held[boundary // self.limits.mamba_block_tokens - 1]
        self.runner.seal_state(block, self.runner.texts["r"].states, boundary)
        old, self.checkpoint = self.checkpoint, (boundary, block)
        if old and old[1] not in self.held.values() and old[1] != block:
            self.free.append(old[1])


def run_seeds(num_seeds: int, runner_class=SymbolicRunner, driver_class=Driver, **options: int) -> list[Driver]:
    drivers = []
    for seed in range(num_seeds):
        rng = random.Random(seed)
        driver = driver_class(rng, draw_limits(rng, **options), runner_class)
        drivers.append(driver)
        driver.run()
    return drivers


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


@pytest.mark.parametrize("num_spec_tokens", [1, 2, 3, 8])
def test_row_defers_wherever_it_may(num_spec_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no other place of a block can a step leave inputs, but at the last, whose only copy is its first token's."""
    right = symbolic_runner.may_defer
    for block_tokens in (2 * num_spec_tokens + 1, 2 * num_spec_tokens + 2, 3 * num_spec_tokens + 3):
        options = {"num_spec_tokens": num_spec_tokens, "block_tokens": block_tokens}
        for place in [p for p in range(block_tokens) if not right(p, block_tokens, num_spec_tokens)]:
            monkeypatch.setattr(symbolic_runner, "may_defer", lambda n, B, S: right(n, B, S) or n % B == place)  # noqa: B023
            if place == block_tokens - 1:
                run_seeds(100, **options)
            else:
                with pytest.raises(AssertionError):
                    run_seeds(NUM_FAULT_SEEDS, **options)


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


def may_defer_ahead(factor: int, more: int) -> Callable:
    """Looks `factor` S + `more` tokens ahead."""
    return lambda right: lambda n, block_tokens, spec: n // block_tokens == (n + factor * spec + more) // block_tokens


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
    "defers one token too long": (symbolic_runner, "may_defer", may_defer_ahead(2, 0)),
    "defers without regard to the next step": (symbolic_runner, "may_defer", may_defer_ahead(1, 1)),
    "defers up to the boundary": (symbolic_runner, "may_defer", may_defer_ahead(1, 0)),
    "always defers": (symbolic_runner, "may_defer", lambda right: lambda n, block_tokens, spec: True),
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


class ReplaysWhereverItMayDefer(SymbolicRunner):
    """Runs drafts again only in a step that defers itself."""

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


class CountLostWithDeferral(SymbolicRunner):
    """A row that deferred starts from its first token, as if none of its drafts had been kept."""

    def _move(self, row: Row) -> PrecopyInfo:
        if self._has_deferred(row):
            self.batch.num_accepted[row.index] = 1
        return super()._move(row)


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
        JudgesLastStepByThisOne,
        JudgesLastStepByItsDrafts,
        AlwaysReplays,
        NeverReplays,
        ReplaysOneLess,
        ReplaysOneMore,
        ReplaysWhereverItMayDefer,
        DefersFirstToken,
        PrefillDefers,
        CountLostWithDeferral,
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
