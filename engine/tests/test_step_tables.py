"""Steps written out by hand from DESIGN section 2: what is scheduled, which columns are held, which states move.

B = 4 and S = 3 throughout. A line is one step of the row: n, q, the columns held, the copy before the forward pass
(source column, destination column, bias) and the one after sampling (boundary, source, destination, bias).
A script says for each step that samples how many drafts follow it, and how many of these are right.
"""

from typing import NamedTuple

import pytest

from mambalign.engine.scheduler_limits import SchedulerLimits
from mambalign.engine.tests.symbolic_engine import SymbolicEngine
from mambalign.worker.mamba_columns import PostcopyInfo, PrecopyInfo

BLOCK, SPEC = 4, 3


class Line(NamedTuple):
    n: int
    q: int
    held: range | list[int]
    before: tuple[int, int, int] | None = None
    after: tuple[int, int, int, int] | None = None


def make_engine(script: list[tuple[int, int]], budget: int = 100) -> SymbolicEngine:
    limits = SchedulerLimits(
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_model_len=64,
        num_spec_tokens=SPEC,
        kv_block_tokens=BLOCK,
        mamba_block_tokens=BLOCK,
        num_kv_blocks=100,
        num_mamba_blocks=100,
        enable_prefix_caching=True,
        num_lookahead_tokens=SPEC,
    )
    plan = iter(script)
    return SymbolicEngine(limits, lambda request_id, num_tokens: next(plan, (0, 0)))


def check(engine: SymbolicEngine, table: list[Line]) -> None:
    """Run the engine's one live request through the table."""
    for i, line in enumerate(table):
        (row,) = engine.step().rows
        before, after = engine.runner.precopies.get(row.request_id), engine.runner.postcopies.get(row.request_id)
        assert (row.num_computed_tokens, row.num_tokens) == (line.n, line.q), f"line {i}"
        assert sorted(row.mamba_blocks) == list(line.held), f"line {i}"
        assert before == (line.before and PrecopyInfo(*line.before)), f"line {i}"
        assert after == (line.after and PostcopyInfo(*line.after)), f"line {i}"


def keeps(*num_kept: int) -> list[tuple[int, int]]:
    """A script of full drafts of which all but the last kept token are right."""
    return [(SPEC, k - 1) for k in num_kept]


PROMPT = [0, 1, 2, 2, 1, 0, 1, 1, 2, 0, 2, 1]

# Every kept count from 1 to 4 before a step that crosses into the next column.
BIASES = {
    # One token a step. Line 3 runs in column 2 already, which n reaches with line 5 only: column 1 waits for state 8.
    0: (
        4,
        keeps(1, 1, 1, 1, 1),
        [
            Line(0, 4, [0]),
            Line(4, 4, range(0, 5), (0, 1, 0)),
            Line(5, 4, range(1, 6), (1, 2, 0)),
            Line(6, 4, range(1, 6)),
            Line(7, 4, range(1, 6), None, (8, 2, 1, 0)),
            Line(8, 4, range(2, 6)),
        ],
    ),
    # Line 3 crosses with bias 1: its temporal source, column 1 + 1, is the destination itself.
    1: (
        2,
        keeps(2, 2, 1),
        [
            Line(0, 2, [0]),
            Line(2, 4, range(0, 5), (0, 1, 0), (4, 1, 0, 1)),
            Line(4, 4, range(1, 5)),
            Line(6, 4, range(1, 6), (1, 2, 1)),
        ],
    ),
    2: (
        2,
        keeps(3, 3, 3, 4, 1),
        [
            Line(0, 2, [0]),
            Line(2, 4, range(0, 5), (0, 1, 0), (4, 1, 0, 1)),
            Line(5, 4, range(1, 6), (1, 2, 2), (8, 2, 1, 2)),
            Line(8, 4, range(2, 6)),
            Line(11, 4, range(2, 7), (2, 3, 2), (12, 3, 2, 0)),
            Line(15, 4, range(3, 8), (3, 4, 3), (16, 4, 3, 0)),
        ],
    ),
    3: (
        3,
        keeps(4, 4, 4),
        [
            Line(0, 3, [0]),
            Line(3, 4, range(0, 5), (0, 1, 0), (4, 1, 0, 0)),
            Line(7, 4, range(1, 6), (1, 2, 3), (8, 2, 1, 0)),
            Line(11, 4, range(2, 7), (2, 3, 3), (12, 3, 2, 0)),
        ],
    ),
}


@pytest.mark.parametrize("bias", BIASES)
def test_crossing_with_bias(bias: int) -> None:
    num_prompt_tokens, script, table = BIASES[bias]
    engine = make_engine(script)
    engine.add(PROMPT[:num_prompt_tokens], 40)
    check(engine, table)


# n = m - 2 with m = 8; the prompt of 6 keeps boundary 4 in column 0 and runs in column 1.
AROUND = [Line(0, 6, [0, 1])]
ENDS = {
    "m-1": (1, Line(6, 4, range(1, 6), (1, 2, 0)), Line(7, 4, range(1, 6), None, (8, 2, 1, 0))),
    "m": (2, Line(6, 4, range(1, 6), (1, 2, 0), (8, 2, 1, 1)), Line(8, 4, range(2, 6))),
    "m+1": (3, Line(6, 4, range(1, 6), (1, 2, 0), (8, 2, 1, 1)), Line(9, 4, range(2, 7), (2, 3, 2))),
}


@pytest.mark.parametrize("end", ENDS)
def test_run_that_ends_around_a_boundary(end: str) -> None:
    num_kept, *table = ENDS[end]
    engine = make_engine(keeps(num_kept, 1))
    engine.add(PROMPT[:6], 40)
    check(engine, AROUND + table)


def test_full_run_onto_the_boundary_stays_in_its_column() -> None:
    """The copy's destination is the running column itself; the next step then starts from it without bias."""
    engine = make_engine(keeps(4, 4))
    engine.add(PROMPT[:4], 40)
    table = [
        Line(0, 4, [0]),
        Line(4, 4, range(0, 5), (0, 1, 0), (8, 1, 1, 3)),
        Line(8, 4, range(1, 6), (1, 2, 0), (12, 2, 2, 3)),
    ]
    check(engine, table)


@pytest.mark.parametrize("num_kept", [1, 2])
def test_no_drafts_after_rejected_ones(num_kept: int) -> None:
    """The step of one token would end a column earlier than the last: the running column does not move back."""
    tables = {
        1: [
            Line(6, 4, range(1, 6), (1, 2, 0)),
            Line(7, 1, range(1, 6), None, (8, 2, 1, 0)),
            Line(8, 1, range(2, 6)),
            Line(9, 4, range(2, 7), (2, 3, 0)),
        ],
        2: [
            Line(6, 4, range(1, 6), (1, 2, 0), (8, 2, 1, 1)),
            Line(8, 1, range(2, 6)),  # reads the live state in column 3
            Line(9, 1, range(2, 6)),
            Line(10, 4, range(2, 7), (2, 3, 0)),
        ],
    }
    engine = make_engine([*keeps(num_kept), (0, 0), (0, 0), *keeps(1)])
    engine.add(PROMPT[:6], 40)
    check(engine, AROUND + tables[num_kept])


def test_prefill_with_three_asked_boundaries() -> None:
    """Source, running column and three boundaries: the most that a prefill holds.

    The first prompt leaves a state at 4, the second at 16 and 20. The third follows the second up to 13, so it resumes
    from 4 and keeps the junction 12 beside 16 and 20.
    """
    engine = make_engine([])
    long = [*PROMPT, *PROMPT[:10]]
    engine.generate(long[:5], 1)
    engine.generate(long, 1)
    parted = long[:13] + [(t + 1) % 3 for t in long[13:]] + [0]
    third = engine.add(parted, 2)
    check(engine, [Line(4, 19, [0, 2, 3, 4, 5], (0, 5, 0)), Line(23, 1, range(5, 9), None, (24, 5, 5, 0))])
    assert third.num_cached_tokens == 4
    engine.check_idle()
    assert [engine.generate(parted[:n], 1).num_cached_tokens for n in (12, 13, 17, 21, 23)] == [4, 12, 16, 20, 20]


def test_prefill_in_chunks() -> None:
    """A chunk that ends on an asked boundary leaves it in the running column, and the next one moves on."""
    engine = make_engine(keeps(1), budget=8)
    engine.add(PROMPT[:10], 5)
    table = [
        Line(0, 8, [0, 1]),
        Line(8, 2, [1, 2], (1, 2, 0)),
        Line(10, 4, range(2, 7), (2, 3, 0)),
    ]
    check(engine, table)


def test_resume_one_token_behind_a_checkpoint() -> None:
    """A prompt of k*B + 1 tokens, repeated: one token to run, yet a prefill, out of a block that stays as it is."""
    engine = make_engine([(0, 0)] * 2 + keeps(2))
    engine.generate(PROMPT[:9], 1)
    again = engine.add(PROMPT[:9], 20)
    table = [
        Line(8, 1, [1, 2], (1, 2, 0)),
        Line(9, 1, range(2, 6)),
        Line(10, 4, range(2, 7), (2, 3, 0), (12, 3, 2, 1)),
    ]
    check(engine, table)
    assert again.num_cached_tokens == 8


def test_drafts_shrink_at_the_end() -> None:
    """Five tokens asked for: one from the prefill, then no step may bring more than what is left."""
    engine = make_engine(keeps(2, 2, 1))
    engine.add(PROMPT[:6], 5)
    table = [
        Line(0, 6, [0, 1]),
        Line(6, 4, range(1, 6), (1, 2, 0), (8, 2, 1, 1)),
        Line(8, 2, range(2, 6)),
    ]
    check(engine, table)
    engine.check_idle()
