"""Plays the plans of seeds, adds up what they went through, and tells a difference so that it can be played again."""

import traceback
from collections.abc import Callable, Iterable

from lossless.plan import Plan
from lossless.play import play
from lossless.shrink import shrink
from lossless.tally import Tally
from lossless.traffic import NUM_ENGINES, draw_plan

QUICK_SEEDS = range(5 * NUM_ENGINES)
SHRINK_SECONDS = 120.0


class DifferenceFound(AssertionError):
    """The text says what differs, how to play it again, and holds a test to paste."""


def prove(
    seeds: Iterable[int], tally: Tally, say: Callable[[str], None], shrink_seconds: float = SHRINK_SECONDS
) -> None:
    """Play each seed's plan. Raises DifferenceFound at the first that fails, made small."""
    for seed in seeds:
        try:
            tally.add(play(draw_plan(seed)))
        except Exception as error:
            tally.mismatches += 1
            say(f"seed {seed}: {describe(error)}")
            raise DifferenceFound(tell(seed, draw_plan(seed), shrink_seconds)) from error


def tell(seed: int, plan: Plan, shrink_seconds: float) -> str:
    small = shrink(plan, lambda plan: failure_of(plan) is not None, shrink_seconds)
    error = failure_of(small)
    what = "passes when played again: it depends on what the process did before"
    if error is not None:
        what = describe(error)
    return "\n".join(
        [
            f"seed {seed}: {what}",
            "".join(traceback.format_exception(error)) if error is not None else "",
            f"again: python scripts/prove.py --seed {seed}",
            f"small: python scripts/prove.py --replay '{small.to_json()}'",
            "as a test, for e2e/lossless/:",
            "",
            f"def test_found_by_seed_{seed}() -> None:",
            f'    """{what.splitlines()[0][:90]}"""',
            "    play(Plan.from_json(",
            f"        {small.to_json()!r}",
            "    ))",
        ]
    )


def failure_of(plan: Plan) -> Exception | None:
    try:
        play(plan)
    except Exception as error:
        return error
    return None


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
