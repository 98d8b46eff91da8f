"""A `Client` for an engine in this process, watched at every step: books checked, freed blocks filled with NaN."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from asks import Answer, Ask, Choice, sampling_params
from cells import default_model

from mambalign.engine import LLM
from mambalign.engine.block_pool import BlockPool
from mambalign.engine.core import EngineCore
from mambalign.engine.messages import EngineOutput, EngineStats
from mambalign.engine.request_factory import RequestFactory
from mambalign.worker.models.hybrid import HybridModel


def pool_tensors(core: EngineCore) -> list[tuple[BlockPool, list[torch.Tensor]]]:
    """The KV pool and the state pool, each with the tensors that its blocks are of."""
    cache, scheduler = core.runner.cache, core.scheduler
    states = [*cache.conv, *cache.temporal, *([] if cache.carry is None else [cache.carry])]
    return [(scheduler.blocks.kv_pool, [*cache.keys, *cache.values]), (scheduler.blocks.mamba_pool, states)]


class Poison:
    """Fills every block that holds nothing with NaN: a state or key that is read before it was written shows.

    A block holds something while a request holds it or it is cached.
    """

    def __init__(self, core: EngineCore):
        self._pools = pool_tensors(core)
        self._poisoned: dict[str, set[int]] = {pool.name: set() for pool, _ in self._pools}

    def spread(self) -> None:
        for pool, tensors in self._pools:
            in_use = pool.published().keys() | {b for b in range(1, pool.num_blocks) if pool.is_held(b)}
            empty = set(range(1, pool.num_blocks)) - in_use
            fresh = sorted(empty - self._poisoned[pool.name])
            for tensor in tensors if fresh else ():
                tensor[fresh] = torch.nan
            self._poisoned[pool.name] = empty


@dataclass
class _Run:
    """One ask on its way."""

    ask: Ask
    answer: Answer
    request_ids: list[str] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    num_steps: int = 0
    has_begun: bool = False
    has_reset: bool = False

    @property
    def has_ended(self) -> bool:
        return self.has_begun and not self.live


class LocalClient:
    """Owns an `LLM`. Runners on a CPU have run a step when `step` returns, so that poison hits nothing in flight.

    loaded: the weights of the option `model`; None: of the model that ships.
    """

    def __init__(self, loaded: HybridModel | None = None, **options: Any):
        with mock.patch("mambalign.engine.core.load_model", return_value=loaded or default_model()):  # half a second
            self.llm = LLM(**options)
        self.core: EngineCore = self.llm.core
        self.poison = Poison(self.core)
        self._factory = RequestFactory(seed=0)
        self._step = self.core.step
        self.core.step = self._watched_step  # what LLM.generate calls, too
        self.poison.spread()

    def _watched_step(self) -> list[EngineOutput]:
        outputs = self._step()
        self.core.check()
        self.poison.spread()
        return outputs

    def run(self, asks: Sequence[Ask]) -> list[Answer]:
        if all(ask.start is ask.abort_after is ask.reset_after is None for ask in asks):
            return self._generate(asks)
        runs = [_Run(ask, Answer([Choice() for _ in range(ask.n)])) for ask in asks]
        by_id: dict[str, tuple[_Run, Choice]] = {}
        while not all(run.has_ended for run in runs):
            self._begin(runs, by_id)
            for run in runs:
                self._interfere(run)
            for output in self.core.step():
                run, choice = by_id[output.request_id]
                add_output(run.answer, choice, output)
                if output.finish_reason:
                    run.live.remove(output.request_id)
            for run in runs:
                run.num_steps += run.has_begun
        return [run.answer for run in runs]

    def _generate(self, asks: Sequence[Ask]) -> list[Answer]:
        results = self.llm.generate([ask.prompt for ask in asks], [sampling_params(ask) for ask in asks])
        return [
            Answer(
                [Choice(c.token_ids, c.logprobs, c.finish_reason) for c in result.outputs],
                result.num_cached_tokens,
                result.num_draft_tokens,
                result.num_accepted_tokens,
            )
            for result in results
        ]

    def _begin(self, runs: list[_Run], by_id: dict[str, tuple[_Run, Choice]]) -> None:
        for run in runs:
            start = run.ask.start
            if run.has_begun or (start and not is_reached(runs[start.ask], start.num_tokens)):
                continue
            requests = self._factory.split(run.ask.prompt, sampling_params(run.ask))
            for request, choice in zip(requests, run.answer.choices, strict=True):
                self.core.add_request(request)
                by_id[request.request_id] = (run, choice)
            run.request_ids = [request.request_id for request in requests]
            run.live = set(run.request_ids)
            run.has_begun = True

    def _interfere(self, run: _Run) -> None:
        ask = run.ask
        if run.live and ask.abort_after is not None and run.num_steps >= ask.abort_after:
            for request_id in run.live:
                self.core.abort(request_id)
        if ask.reset_after is not None and not run.has_reset and run.answer.num_tokens >= ask.reset_after:
            assert not self.core.reset_prefix_cache()  # this one still runs
            run.has_reset = True

    def stats(self) -> EngineStats:
        return self.core.stats()

    def reset_prefix_cache(self) -> None:
        assert self.core.reset_prefix_cache()

    def assert_idle(self) -> None:
        self.core.check()
        assert not self.core.has_work()
        for name, (num_free, num_usable) in self.core.free_blocks().items():
            assert num_free == num_usable, f"{name}: {num_usable - num_free} blocks leaked"

    def close(self) -> None:
        """Let go of the engine's memory now: what watches a core is a cycle with it."""
        self.llm.shutdown()
        self.core = self.poison = self._step = None
        gc.collect()


def is_reached(run: _Run, num_tokens: int) -> bool:
    return run.has_begun and (run.answer.num_tokens >= num_tokens or not run.live)


def add_output(answer: Answer, choice: Choice, output: EngineOutput) -> None:
    choice.token_ids += output.new_token_ids
    if output.new_logprobs is not None:
        choice.logprobs = [*(choice.logprobs or []), *output.new_logprobs]
    choice.finish_reason = output.finish_reason
    if choice is answer.choices[0]:
        answer.num_cached_tokens = output.num_cached_tokens
    if output.finish_reason:
        answer.num_draft_tokens += output.num_draft_tokens
        answer.num_accepted_tokens += output.num_accepted_tokens
