"""The quick profile: some minutes of random traffic, every text and all memory compared; then whether it went anywhere.

`python scripts/prove.py --minutes N` goes on for as long as one likes.
"""

import pytest
from lossless.prover import QUICK_SEEDS, prove
from lossless.tally import Tally
from lossless.traffic import NUM_ENGINES

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
