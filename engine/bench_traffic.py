"""The traffic of a benchmark: who asks when and how much, drawn from a seed, and the texts to ask with."""

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LONG_EVERY = 8  # users, of whom one brings a long prompt
LONG_FIRST = 3  # the first that does


@dataclass(frozen=True)
class Turn:
    message_tokens: int
    reply_tokens: int
    pause: float  # seconds from its reply to the next message


@dataclass(frozen=True)
class Talk:
    """One user: what it asks, one turn after the other."""

    starts_at: float  # seconds after the traffic began
    turns: list[Turn]


def draw_requests(
    rng: random.Random, num_requests: int, rate: float | None, message_tokens: int, reply_tokens: int
) -> list[Talk]:
    """Users of one turn each: `rate` new ones a second (Poisson), or all at once."""
    talks, at = [], 0.0
    for _ in range(num_requests):
        at += rng.expovariate(rate) if rate is not None else 0.0
        talks.append(Talk(at, [Turn(message_tokens, reply_tokens, 0.0)]))
    return talks


def draw_talks(
    rng: random.Random,
    num_users: int,
    num_turns: int,
    *,
    rate: float,
    message_tokens: int,
    long_tokens: int,
    reply_tokens: int,
) -> list[Talk]:
    """Users who talk in turns: `rate` new ones a second (Poisson), a mean pause of a second.

    Messages are an eighth to all of `message_tokens` long and replies a quarter to all of `reply_tokens`; the first
    message of one user in eight is `long_tokens` long.
    """
    talks, at = [], 0.0
    for user in range(num_users):
        at += rng.expovariate(rate)
        is_long = user % LONG_EVERY == LONG_FIRST
        messages = [
            long_tokens if is_long and turn == 0 else rng.randint(max(1, message_tokens // 8), message_tokens)
            for turn in range(num_turns)
        ]
        pauses = [rng.expovariate(1.0) for _ in messages]
        replies = [rng.randint(max(1, reply_tokens // 4), reply_tokens) for _ in messages]
        talks.append(Talk(at, [Turn(*turn) for turn in zip(messages, replies, pauses, strict=True)]))
    return talks


def stdlib_sources() -> Iterator[str]:
    """The modules of the standard library, in the order of their names: the same on every run."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")
