"""What a scenario asks of an engine, and what it gets back, whatever door the engine stands behind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mambalign.engine.messages import EngineStats
from mambalign.worker.sampling_params import SamplingParams, TokenLogprobs

NUM_TOP_LOGPROBS = 3  # alternatives for each token, in process


@dataclass(frozen=True)
class After:
    """The moment when ask number `ask` of the same run has delivered `num_tokens` tokens (0: has begun)."""

    ask: int
    num_tokens: int


@dataclass(frozen=True)
class Ask:
    """One request. End-of-text does not end it: exactly `max_tokens` tokens come, unless it is aborted."""

    prompt: list[int]
    max_tokens: int
    logprobs: bool = False
    n: int = 1
    temperature: float = 0.0
    seed: int | None = None
    start: After | None = None  # None: with the run
    abort_after: int | None = None  # steps after its start (over HTTP: chunks of its stream); 0: before the first
    reset_after: int | None = None  # tokens after which it has the prefix cache reset


def sampling_params(ask: Ask) -> SamplingParams:
    """As an engine of ours takes them."""
    return SamplingParams(
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        seed=ask.seed,
        n=ask.n,
        ignore_eos=True,
        logprobs=NUM_TOP_LOGPROBS if ask.logprobs else None,
    )


@dataclass
class Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | list[float] | None = None  # over HTTP: of the taken tokens
    finish_reason: str | None = None


@dataclass
class Answer:
    """All that came for one ask. An aborted one has what came before."""

    choices: list[Choice]
    num_cached_tokens: int | None = None  # of choice 0; None if it was never told (aborted over HTTP)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


class Client(Protocol):
    """An engine, in this process or behind a server."""

    def run(self, asks: Sequence[Ask]) -> list[Answer]:
        """All asks at once, or when their moment comes; returns when every one has ended."""
        ...

    def stats(self) -> EngineStats: ...

    def reset_prefix_cache(self) -> None: ...

    def assert_idle(self) -> None:
        """No request is left and nothing leaked: every block is free, every book is right."""
        ...

    def close(self) -> None: ...
