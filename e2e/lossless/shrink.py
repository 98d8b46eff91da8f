"""Makes a plan that fails as small as it goes, one change at a time, for as long as it still fails."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from lossless.plan import Ask, Plan, Setup


def shrink(plan: Plan, fails: Callable[[Plan], bool], seconds: float) -> Plan:
    """The smallest plan found in about `seconds` for which `fails` is true, as it is for `plan`."""
    deadline = time.monotonic() + seconds
    has_shrunk = True
    while has_shrunk:
        has_shrunk = False
        for smaller in candidates(plan):
            if time.monotonic() > deadline:
                return plan
            if fails(smaller):
                plan, has_shrunk = smaller, True
                break
    return plan


def candidates(plan: Plan) -> Iterator[Plan]:
    """Plans a little smaller, the largest steps first: without some asks, without resets, with plainer values."""
    asks, replace = plan.asks, msgspec.structs.replace
    size = len(asks) // 2
    while size:
        for start in range(0, len(asks), size):
            yield replace(plan, asks=asks[:start] + asks[start + size :])
        size //= 2
    for i in range(len(plan.resets)):
        yield replace(plan, resets=plan.resets[:i] + plan.resets[i + 1 :])
    for i, ask in enumerate(asks):
        for plainer in plainer_structs(ask, Ask()):
            yield replace(plan, asks=(*asks[:i], plainer, *asks[i + 1 :]))
    for plainer in plainer_structs(plan.setup, Setup()):
        yield replace(plan, setup=plainer)


def plainer_structs(struct: Any, plain: Any) -> Iterator[Any]:
    """`struct` with one field nearer to what it is in `plain`."""
    for name in struct.__struct_fields__:
        for value in plainer_values(getattr(struct, name), getattr(plain, name)):
            yield msgspec.structs.replace(struct, **{name: value})


def plainer_values(value: Any, plain: Any) -> Iterator[Any]:
    if value == plain:
        return
    yield plain
    if isinstance(value, int) and isinstance(plain, int) and not isinstance(value, bool):
        if abs(value - plain) > 1:
            yield (value + plain) // 2
            yield value - 1 if value > plain else value + 1
    elif isinstance(value, tuple) and value:
        if len(value) > 1:
            yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
        for i, entry in enumerate(value):
            if isinstance(entry, msgspec.Struct):
                for smaller in plainer_structs(entry, type(entry)()):
                    yield (*value[:i], smaller, *value[i + 1 :])
