"""The proof's own machinery: plans as data, failures made small and told, and a tally that notices what is missing."""

import msgspec
import pytest
from lossless import prover
from lossless.plan import Ask, Piece, Plan, Setup
from lossless.prover import DifferenceFound, prove
from lossless.shrink import shrink
from lossless.tally import Tally
from lossless.traffic import ENGINES, NUM_ENGINES, draw_plan


def test_a_seed_is_a_plan_and_a_plan_a_line() -> None:
    for seed in range(NUM_ENGINES):
        plan = draw_plan(seed)
        assert plan == draw_plan(seed) == Plan.from_json(plan.to_json())
        assert "\n" not in plan.to_json()
    setups = [draw_plan(seed).setup for seed in range(NUM_ENGINES)]
    assert {(setup.spec_tokens, setup.runner, setup.layout) for setup in setups} == set(ENGINES)


def test_a_failing_plan_is_made_as_small_as_it_goes() -> None:
    def fails(plan: Plan) -> bool:
        return any(ask.n > 1 and ask.pieces[0].num_tokens >= 5 for ask in plan.asks) and plan.setup.layout == "DS"

    big = next(plan for plan in map(draw_plan, range(1000)) if fails(plan) and len(plan.asks) > 5)
    small = shrink(big, fails, seconds=60.0)
    assert small == Plan(Setup(layout="DS"), (Ask((Piece(num_tokens=5),), n=2),))


def test_what_differs_is_told_with_a_test_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(plan: Plan) -> Tally:
        assert all(ask.max_tokens < 9 for ask in plan.asks), "too many tokens"
        return Tally(runs=1)

    monkeypatch.setattr(prover, "play", play)
    tally, lines = Tally(), []
    with pytest.raises(DifferenceFound) as found:
        prove(range(100), tally, lines.append)
    assert tally.mismatches == 1 and lines == [f"seed {tally.runs}: AssertionError: too many tokens"]
    told = str(found.value)
    _, pasted = told.split("as a test:\n\n")
    played: list[Plan] = []
    monkeypatch.setattr("lossless.play.play", played.append)
    names: dict = {}
    exec(compile(pasted, "pasted", "exec"), names)
    names[f"test_found_by_seed_{tally.runs}"]()
    assert played == [Plan(asks=(Ask(max_tokens=9),))]
    assert f"--replay '{played[0].to_json()}'" in told


def test_a_tally_that_lacks_something_says_what() -> None:
    tally = Tally()
    tally.see(msgspec.structs.replace(Setup(), spec_tokens=3))
    gaps = tally.gaps()
    assert "runner=v2" in gaps and "runner=v1" not in gaps
    assert "preemptions" in gaps and "ending abort" in gaps
    tally.crossings.update({("v1", "DS", bias): 1 for bias in range(8)})
    assert "crossings of v1 DS with bias [8]" in tally.gaps()
