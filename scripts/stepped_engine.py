"""An engine that is stepped by hand, so that every request's tokens can be timed as they come."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mambalign.engine import SamplingParams
from mambalign.engine.messages import EngineOutput, EngineRequest
from mambalign.engine.request_factory import RequestFactory

FIRST_TOKEN = 4  # ids below it are special in the models that are measured


@dataclass
class Timed:
    """A request and when its tokens were seen, in seconds of `time.perf_counter`."""

    request: EngineRequest
    asked: float
    seen: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens that came)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    ended: bool = False

    def add(self, output: EngineOutput, now: float) -> None:
        if output.finish_reason == "error":
            raise RuntimeError(output.error)
        if output.new_token_ids:
            self.seen.append((now, len(output.new_token_ids)))
            self.token_ids += output.new_token_ids
        self.num_cached_tokens = output.num_cached_tokens
        self.ended = output.finish_reason is not None

    @property
    def first(self) -> float:
        return self.seen[0][0]

    @property
    def ttft(self) -> float:
        return self.first - self.asked


class SteppedEngine:
    """A core, random prompts for it, and greedy requests of exactly so many tokens."""

    def __init__(self, core: Any, seed: int = 0):
        self.core = core
        self._random = random.Random(seed)
        self._factory = RequestFactory(seed)

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN, self.core.vocab_size) for _ in range(num_tokens)]

    def ask(self, prompt: list[int], num_tokens: int, asked: float | None = None) -> Timed:
        """Queue a greedy request of exactly `num_tokens` tokens."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        timed = Timed(self._factory.split(prompt, params)[0], asked or time.perf_counter())
        self.core.add_request(timed.request)
        return timed

    def step(self, live: dict[str, Timed]) -> None:
        for output in self.core.step():
            timed = live[output.request_id]
            timed.add(output, time.perf_counter())
            if timed.ended:
                del live[output.request_id]

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> list[Timed]:
        """All at once, to their end."""
        requests = [self.ask(prompt, num_tokens) for prompt in prompts]
        live = {timed.request.request_id: timed for timed in requests}
        while live or self.core.has_work():
            self.step(live)
        assert all(len(timed.token_ids) == num_tokens for timed in requests)
        return requests
