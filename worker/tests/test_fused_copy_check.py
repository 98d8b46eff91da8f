"""The live check of the fused pre-copy: what is equal passes, and every way to be wrong is found and named."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mambalign.kernels.precopy_mamba_align import precopy_mamba_align_fused
from mambalign.kernels.preprocess_mamba_align import preprocess_mamba_align_fused
from mambalign.worker import mamba_gpu_context, mamba_utils
from mambalign.worker.batch import NewRow, ScheduledRow, SchedulerOutput
from mambalign.worker.forward_batch import mamba_tables
from mambalign.worker.fused_copy_check import FusedCopyChecker, check_fused_copy_info
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import PrecopyInfo, precopy
from mambalign.worker.mamba_laws import RowBefore
from mambalign.worker.mamba_utils import (
    CopyCounts,
    MambaSpecDecodeGPUContext,
    preprocess_mamba,
)
from mambalign.worker.sampling_params import SamplingParams
from mambalign.worker.slot_batch import SlotBatch
from mambalign.worker.state_cache import StateCache, StateSpec

W, DIM, B = 4, 11, 8
LAYOUTS, RUNNERS = ("SD", "DS"), ("v1", "v2")
CONV, TEMPORAL, CARRY = (0, 1), (2, 3), 4  # where `StateCache.mamba_states` puts each kind


def make_cache(layout: str, num_spec_tokens: int, num_blocks: int, only_conv: bool = False) -> StateCache:
    """Five states, or the two conv states, of random bits, so that no two blocks, slots or channels are alike."""
    specs = [StateSpec("0", "conv", (DIM,), torch.float32), StateSpec("0", "temporal", (2, 3), torch.float32)]
    specs += [StateSpec("1", "conv", (DIM,), torch.bfloat16), StateSpec("1", "temporal", (4,), torch.bfloat16)]
    specs += [StateSpec("mtp", "carry", (3,), torch.float32)]
    specs = [spec for spec in specs if spec.kind == "conv" or not only_conv]
    cache = StateCache.allocate(
        [],
        specs,
        num_kv_blocks=1,
        num_mamba_blocks=num_blocks,
        kv_block_tokens=1,
        mamba_block_tokens=B,
        conv_layout=layout,
        conv_width=W,
        num_spec_tokens=num_spec_tokens,
    )
    generator = torch.Generator().manual_seed(0)
    for state in cache.mamba_states():
        state.tensor.normal_(generator=generator)
    return cache


@dataclass(frozen=True)
class Row:
    """A row before its step: column 0 is its running one, and it moves to column 1 when `moves`."""

    num_accepted: int
    moves: bool = True

    @property
    def num_computed_tokens(self) -> int:
        return B if self.moves else 1


class Step:
    """A step of decode rows, one token each, through either runner's own batch; V2's slots are not in row order."""

    def __init__(
        self,
        runner: str,
        layout: str,
        num_spec_tokens: int,
        rows: list[Row],
        rate: float = 1.0,
        only_conv: bool = False,
    ):
        self.rows, self.width = rows, num_spec_tokens + 3
        self.cache = make_cache(layout, num_spec_tokens, 1 + self.width * len(rows), only_conv)
        self.checker = FusedCopyChecker(self.cache, rate)
        self.ctx = MambaSpecDecodeGPUContext(self.cache, len(rows) + 2, self.width)
        slots = random.Random(1).sample(range(len(rows) + 2), len(rows))
        self.idx_mapping = torch.tensor(slots, dtype=torch.int32) if runner == "v2" else None
        self.batch = self._fill_slots(slots) if runner == "v2" else self._fill_rows()

    def blocks(self, i: int) -> dict[int, int]:
        return {column: 1 + i * self.width + column for column in range(self.width)}

    def _fill_rows(self) -> InputBatch:
        batch = InputBatch(len(self.rows), self.width, B)
        for i, row in enumerate(self.rows):
            batch.add(NewRow(str(i), SamplingParams(), 0, 1, [0], 0))
            batch.mamba_state_idx[i], batch.num_accepted[i] = 0, row.num_accepted
        return batch

    def _fill_slots(self, slots: list[int]) -> SlotBatch:
        batch = SlotBatch(self.ctx, len(self.rows) + 2, self.width - 3, 0)
        for i, (row, slot) in enumerate(zip(self.rows, slots, strict=True)):
            batch.running_column[slot], batch.num_accepted[slot] = 0, row.num_accepted
            batch.num_computed[slot] = row.num_computed_tokens
            batch.set_block_tables(torch.tensor([slot]), torch.from_numpy(mamba_tables([self.blocks(i)], self.width)))
        return batch

    def run(self) -> CopyCounts:
        rows = [
            ScheduledRow(str(i), 0, row.num_computed_tokens, [0], True, [], self.blocks(i), [], None)
            for i, row in enumerate(self.rows)
        ]
        return preprocess_mamba(
            SchedulerOutput(rows),
            self.batch,
            self.cache,
            align_ctx=self.ctx,
            idx_mapping=self.idx_mapping,
            checker=self.checker,
        )

    def failed(self) -> list[str]:
        """Ids of the rows that the check of one run refuses; its counter agrees."""
        ids = [mismatch.request_id for mismatch in self.run().mismatches]
        assert self.checker.num_mismatches == len(ids)
        return ids


# decisions


def test_equal_decisions_pass():
    for info in (PrecopyInfo(-1, 0, 0), PrecopyInfo(-1, 3, 2), PrecopyInfo(2, 3, 0), PrecopyInfo(2, 3, 7)):
        assert check_fused_copy_info(info, info) is None


@pytest.mark.parametrize(
    ("fused", "words"),
    [
        (PrecopyInfo(1, 3, 1), "source_column is 1 in the fused path and 2 in the scalar path"),
        (PrecopyInfo(2, 4, 1), "dest_column is 4 in the fused path and 3 in the scalar path"),
        (PrecopyInfo(2, 3, 0), "token_bias is 0 in the fused path and 1 in the scalar path"),
        (PrecopyInfo(-1, 3, 1), "source_column is -1 in the fused path and 2 in the scalar path"),
    ],
)
def test_a_wrong_field_is_named(fused, words):
    expected = PrecopyInfo(2, 3, 1)
    assert check_fused_copy_info(expected, fused) == words
    skipped = check_fused_copy_info(fused, expected)
    assert skipped.startswith(words.split()[0])


def test_a_row_that_skips_must_agree_on_its_column_too():
    assert "dest_column" in check_fused_copy_info(PrecopyInfo(-1, 3, 1), PrecopyInfo(-1, 2, 1))
    assert "source_column" in check_fused_copy_info(PrecopyInfo(-1, 3, 1), PrecopyInfo(2, 3, 1))


# bytes


def conv_slot_bytes(cache: StateCache, index: int, block: int, slot: int) -> torch.Tensor:
    """The bytes of one slot of a conv block, [dim, element size], writable."""
    conv = cache.mamba_states()[index].tensor[block]
    slots = conv.T if cache.conv_layout == "DS" else conv
    return slots[slot].unsqueeze(-1).view(torch.uint8)


def flipped(where: torch.Tensor, at: tuple[int, ...], problem: Callable[[], str | None]) -> str | None:
    """What the check says with one bit of memory wrong; the bit is put right again."""
    where[at] ^= 1
    text = problem()
    where[at] ^= 1
    return text


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_spec_tokens", [0, 1, 3, 7])
def test_every_defined_byte_is_compared_and_no_other(layout, num_spec_tokens):
    width, state_len = num_spec_tokens + 3, W - 1 + num_spec_tokens
    for bias in range(num_spec_tokens + 1):
        cache = make_cache(layout, num_spec_tokens, 1 + width)
        checker, ctx = FusedCopyChecker(cache), MambaSpecDecodeGPUContext(cache, 1, width)
        table = np.arange(1, 1 + width, dtype=np.int32)
        before = RowBefore("r", 0, B, 1, bias + 1, table)
        expected, info = checker.expect([before]), precopy(0, B, 1, bias + 1, B)
        ctx.precopy_src_col_buf.np[0], ctx.mamba_state_idx_buf.np[0], ctx.precopy_token_bias_buf.np[0] = info
        ctx.block_table_buf.np[0, 0], dest = table, int(table[info.dest_column])
        ctx.stage(1)
        ctx.run_fused_precopy(1, use_work_list=False)

        def problem(checker=checker, expected=expected, info=info) -> str | None:
            mismatches = checker.check(expected, [info])
            return mismatches[0].text if mismatches else None

        assert problem() is None
        for index, slot in ((index, slot) for index in CONV for slot in range(state_len)):
            where = conv_slot_bytes(cache, index, dest, slot)
            is_defined = slot < state_len - bias
            for at in ((0, 0), (DIM - 1, where.shape[1] - 1)):
                text = flipped(where, at, problem)
                assert (text is not None) == is_defined
                assert not is_defined or text.startswith(f"state {index}: 1 bytes differ")
        for index in (*TEMPORAL, CARRY):
            where = cache.mamba_states()[index].tensor[dest].view(-1).view(torch.uint8)
            for at in (0, len(where) // 2, len(where) - 1):
                assert flipped(where, (at,), problem).startswith(f"state {index}: 1 bytes differ")
        assert problem() is None


def test_the_text_of_a_mismatch_holds_the_whole_decision():
    cache = make_cache("DS", 3, 8)
    checker = FusedCopyChecker(cache)
    before = RowBefore("request-7-0", 0, B, 2, 3, np.arange(1, 7, dtype=np.int32))
    (mismatch,) = checker.check(checker.expect([before]), [PrecopyInfo(0, 1, 1)])
    assert mismatch.request_id == "request-7-0"
    for words in (
        "token_bias is 1",
        "expected PrecopyInfo(source_column=0, dest_column=1, token_bias=2)",
        "fused PrecopyInfo(source_column=0, dest_column=1, token_bias=1)",
        "num_computed_tokens=8, num_tokens=2, num_accepted=3",
        "table_row=array([1, 2, 3, 4, 5, 6]",
    ):
        assert words in mismatch.text


# rate and counters


def test_rate_is_an_even_share():
    cache = make_cache("SD", 0, 2)
    for rate, period in ((1.0, 1), (0.5, 2), (0.25, 4), (0.125, 8)):
        checker = FusedCopyChecker(cache, rate)
        wanted = [checker.wants_step() for _ in range(10 * period)]
        assert wanted == [i % period == period - 1 for i in range(10 * period)]
    checker = FusedCopyChecker(cache, 0.3)
    assert sum(checker.wants_step() for _ in range(1000)) in (299, 300)
    assert not any(FusedCopyChecker(cache, 0.0).wants_step() for _ in range(100))


@pytest.mark.parametrize("runner", RUNNERS)
def test_only_a_share_of_the_steps_is_checked(runner):
    step = Step(runner, "SD", 1, [Row(1, moves=False)], rate=0.25)
    for _ in range(8):
        step.run()
    assert step.checker.checks == {0: 2}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_counters_by_bias_include_rows_that_copy_nothing(runner, layout):
    rows = [Row(1), Row(1, moves=False), Row(2), Row(3, moves=False), Row(4), Row(4), Row(4, moves=False)]
    step = Step(runner, layout, 3, rows)
    assert step.failed() == []
    assert step.checker.checks == {0: 2, 1: 1, 2: 1, 3: 3}
    assert {bias: count for bias, count in step.checker.copies.items() if count} == {0: 1, 1: 1, 3: 2}


# through `preprocess_mamba`, with the copy as it is and with broken ones


def every_bias(num_spec_tokens: int) -> list[Row]:
    """A row that moves for every bias, and one that stays between any two."""
    accepted = range(1, num_spec_tokens + 2)
    return [row for a in accepted for row in (Row(a, moves=False), Row(a))]


def moving(rows: list[Row], is_hit: Callable[[Row], bool]) -> list[str]:
    return [str(i) for i, row in enumerate(rows) if row.moves and is_hit(row)]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_spec_tokens", "only_conv"), [(0, False), (1, False), (3, False), (7, False), (3, True)])
def test_the_real_copy_passes(runner, layout, num_spec_tokens, only_conv):
    step = Step(runner, layout, num_spec_tokens, every_bias(num_spec_tokens), only_conv=only_conv)
    assert step.failed() == []
    assert sum(step.checker.copies.values()) == num_spec_tokens + 1
    assert sum(step.checker.checks.values()) == 2 * (num_spec_tokens + 1)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("only_conv", [False, True])
def test_bias_off_by_one_in_the_copy_is_caught(monkeypatch, runner, layout, only_conv):
    def broken(source, dest, bias, *rest):
        precopy_mamba_align_fused(source, dest, (bias - 1).clamp(min=0), *rest)

    rows = every_bias(3)
    monkeypatch.setattr(mamba_gpu_context, "precopy_mamba_align_fused", broken)
    step = Step(runner, layout, 3, rows, only_conv=only_conv)
    assert step.failed() == moving(rows, lambda row: row.num_accepted > 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_that_ignores_idx_mapping_is_caught(monkeypatch, layout):
    def broken(source, dest, bias, table, idx_mapping, *rest):
        precopy_mamba_align_fused(source, dest, bias, table, None, *rest)

    rows = every_bias(3)
    monkeypatch.setattr(mamba_gpu_context, "precopy_mamba_align_fused", broken)
    step = Step("v2", layout, 3, rows)
    slots = step.idx_mapping.tolist()
    visited = {i for i, row in enumerate(rows) if row.moves}  # slots of these numbers, if they move
    missed = [str(i) for i in visited if slots[i] not in visited]
    assert missed and step.failed() == missed


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_that_shifts_channels_for_slots_is_caught(monkeypatch, runner, layout):
    """A DS block shifted by a slice of its first axis, as an SD one is, and the other way round."""
    rows, steps = every_bias(3), []

    def broken(*arguments):
        precopy_mamba_align_fused(*arguments)
        cache = steps[0].cache
        for i, row in enumerate(rows):
            source, dest = (steps[0].blocks(i)[column] for column in (0, 1))
            axis, bias = 0 if cache.conv_layout == "DS" else 1, row.num_accepted - 1
            if row.moves:
                for conv in cache.conv:
                    length = conv.shape[1 + axis] - bias
                    conv[dest].narrow(axis, 0, length).copy_(conv[source].narrow(axis, bias, length))

    monkeypatch.setattr(mamba_gpu_context, "precopy_mamba_align_fused", broken)
    steps.append(Step(runner, layout, 3, rows))
    assert steps[0].failed() == moving(rows, lambda row: row.num_accepted > 1)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("index", range(5))
def test_a_copy_that_forgets_a_state_is_caught(monkeypatch, runner, index):
    def broken(*arguments):
        state = steps[0].ctx.states[index].tensor
        before = state.clone()
        precopy_mamba_align_fused(*arguments)
        state.copy_(before)

    rows, steps = every_bias(3), []
    monkeypatch.setattr(mamba_gpu_context, "precopy_mamba_align_fused", broken)
    steps.append(Step(runner, "DS", 3, rows))
    stays = 2 if index not in CONV else 0  # one token accepted past the first: the state is where it must be
    assert steps[0].failed() == moving(rows, lambda row: row.num_accepted != stays)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_copy_that_spoils_a_state_which_stays_is_caught(monkeypatch, runner):
    """Bias 1, one column on: the temporal state's source is its destination, and not a byte may change."""

    def broken(*arguments):
        precopy_mamba_align_fused(*arguments)
        steps[0].cache.temporal[0][steps[0].blocks(0)[1]] = 0

    steps = []
    monkeypatch.setattr(mamba_gpu_context, "precopy_mamba_align_fused", broken)
    steps.append(Step(runner, "SD", 3, [Row(2)]))
    assert steps[0].failed() == ["0"]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("column", [0, 2])  # where it runs, and where its live temporal state lies
def test_a_copy_that_spoils_a_row_which_moves_nothing_is_caught(monkeypatch, runner, column):
    def broken(*arguments):
        precopy_mamba_align_fused(*arguments)
        bits = steps[0].cache.temporal[1][steps[0].blocks(1)[column]].view(torch.int16)
        bits[-1] ^= 1

    steps = []
    monkeypatch.setattr(mamba_gpu_context, "precopy_mamba_align_fused", broken)
    steps.append(Step(runner, "SD", 3, [Row(2), Row(3, moves=False), Row(3, moves=False)]))
    assert steps[0].failed() == ["1"]
    assert steps[0].checker.checks == {1: 1, 2: 2}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_copy_of_the_first_row_only_is_caught(monkeypatch, runner):
    def broken(source, dest, bias, table, mapping, work_list, count, *rest):
        precopy_mamba_align_fused(source, dest, bias, table, mapping, work_list, count.clamp(max=1), *rest)

    rows = every_bias(3)
    monkeypatch.setattr(mamba_gpu_context, "precopy_mamba_align_fused", broken)
    step = Step(runner, "DS", 3, rows)
    assert len(step.failed()) == len(moving(rows, lambda row: True)) - 1


@pytest.mark.parametrize("field", PrecopyInfo._fields)
def test_a_wrong_decision_on_the_host_is_caught(monkeypatch, field):
    def broken(*arguments):
        info = precopy(*arguments)
        return info._replace(**{field: getattr(info, field) + 1}) if info.source_column >= 0 else info

    rows = every_bias(3)
    monkeypatch.setattr(mamba_utils, "precopy", broken)
    step = Step("v1", "DS", 3, rows[:-1] if field == "token_bias" else rows)
    mismatches = step.run().mismatches
    assert [m.request_id for m in mismatches] == moving(step.rows, lambda row: True)
    assert all(m.text.startswith(field) for m in mismatches)


def test_a_wrong_decision_on_the_device_is_caught(monkeypatch):
    def broken(idx_mapping, num_scheduled, computed, column, accepted, source, bias, *rest):
        preprocess_mamba_align_fused(idx_mapping, num_scheduled, computed, column, accepted, source, bias, *rest)
        bias += 1

    rows = every_bias(3)[:-1]
    monkeypatch.setattr(mamba_utils, "preprocess_mamba_align_fused", broken)
    mismatches = Step("v2", "DS", 3, rows).run().mismatches
    assert len(mismatches) == len(rows) and all(m.text.startswith("token_bias") for m in mismatches)
