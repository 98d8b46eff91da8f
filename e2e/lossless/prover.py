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
    """Of a plan that fails: what fails once it is small, and how to have that again."""
    small = shrink(plan, lambda plan: failure_of(plan) is not None, shrink_seconds)
    error = failure_of(small)
    what, trace = "passes when played again: it depends on what the process did before", ""
    if error is not None:
        what, trace = describe(error), "".join(traceback.format_exception(error))
    return f"""seed {seed}, made small: {what}
{trace}
again: python scripts/prove.py --seed {seed}
small: python scripts/prove.py --replay '{small.to_json()}'
as a test:

{as_test(seed, small)}"""


def as_test(seed: int, plan: Plan) -> str:
    """To paste into a file of e2e/lossless/."""
    return f"""from lossless.plan import Plan
from lossless.play import play


def test_found_by_seed_{seed}() -> None:
    play(
        Plan.from_json(
            {plan.to_json()!r}
        )
    )
"""


def failure_of(plan: Plan) -> Exception | None:
    try:
        play(plan)
    except Exception as error:
        return error
    return None


def describe(error: Exception) -> str:
    """In one line; of an assertion without a text, its source."""
    text = str(error).splitlines()
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text[0] if text else where.line}"
