"""The quick profile: some minutes of random traffic, every text and all memory compared; then whether it went anywhere.

`python scripts/prove.py --minutes N` goes on for as long as one likes.
"""

from itertools import product

import msgspec
import pytest
from lossless.play import play
from lossless.prover import QUICK_SEEDS, prove
from lossless.tally import Tally
from lossless.traffic import NUM_ENGINES, draw_plan

ROUNDS = [range(start, start + NUM_ENGINES) for start in range(0, len(QUICK_SEEDS), NUM_ENGINES)]


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.mark.parametrize("seeds", ROUNDS, ids=lambda seeds: f"seeds {seeds.start} to {seeds.stop - 1}")
def test_nothing_differs(tally: Tally, seeds: range) -> None:
    prove(seeds, tally, print)


def test_everything_was_gone_through(tally: Tally) -> None:
    if tally.runs + tally.mismatches < len(QUICK_SEEDS):
        pytest.skip("needs every seed")
    print(tally.table())
    assert not tally.gaps()


def test_nothing_differs_where_all_states_are_conv_windows() -> None:
    """No state is copied whole there, and there is no head to draft."""
    tally = Tally()
    for seed in range(0, NUM_ENGINES, 3):  # each number of drafts, each runner with each layout
        plan = draw_plan(seed)
        setup = msgspec.structs.replace(plan.setup, model="conv", spec_method="ngram")
        tally.add(play(msgspec.structs.replace(plan, setup=setup)))
    for by_bias in (tally.crossings, tally.kept):
        assert {(runner, layout) for runner, layout, bias in by_bias if bias} == {*product(("v1", "v2"), ("SD", "DS"))}
    assert min(tally.hits, tally.preemptions, tally.accepted, tally.states) > 0
