"""An engine whose steps run as late as it allows: when their results are asked for, in the order of their launch.

A CPU runner has run a step when it returns, so that no mistake about what is still in flight could show. Here a
launched step has touched nothing until it is booked. Blocks handed out are filled with NaN, in the same order: after
the steps launched before, which may still use what was in them.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from cells import Cell, Pools
from local_client import pool_tensors

from mambalign.engine import LLM
from mambalign.engine.block_pool import BlockPool
from mambalign.engine.core import EngineCore
from mambalign.engine.messages import EngineOutput, EngineRequest
from mambalign.worker.batch import RunnerOutput, ScheduledRow, SchedulerOutput
from mambalign.worker.sampling_params import SamplingParams, TokenLogprobs

BlocksOf = Callable[[ScheduledRow], Iterable[int]]
BLOCKS_OF: tuple[BlocksOf, BlocksOf] = (lambda row: row.kv_blocks, lambda row: row.mamba_blocks.values())


@dataclass
class Life:
    """A request from its start to its end. Several may bear one id, one after the other."""

    prompt: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    num_cached_tokens: int = 0
    finish_reason: str | None = None

    def add(self, output: EngineOutput) -> None:
        self.token_ids += output.new_token_ids
        self.logprobs += output.new_logprobs or []
        self.text += output.new_text
        self.num_cached_tokens, self.finish_reason = output.num_cached_tokens, output.finish_reason


class LateStep:
    """A launched step; `result` runs what was launched up to it."""

    def __init__(self, runner: "LateRunner", scheduled: SchedulerOutput):
        self.runner = runner
        self.scheduled = scheduled
        self.output: RunnerOutput | None = None

    def run(self) -> None:
        self.output = self.runner.inner.execute_model(self.scheduled).result()
        self.runner.in_flight.remove(self)

    def result(self) -> RunnerOutput:
        while self.output is None:
            self.runner.queue.popleft()()
        return self.output


class LateRunner:
    """Stands in for the runner `inner`. `queue`: what was launched, steps and fills."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.queue: deque[Callable[[], None]] = deque()
        self.in_flight: list[LateStep] = []
        self.launches: list[tuple[list[ScheduledRow], list[ScheduledRow]]] = []  # rows of a step, rows in flight then

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def execute_model(self, scheduled: SchedulerOutput) -> LateStep:
        step = LateStep(self, scheduled)
        self.launches.append((scheduled.rows, [row for s in self.in_flight for row in s.scheduled.rows]))
        self.in_flight.append(step)
        self.queue.append(step.run)
        return step


def poison_handed_out(
    runner: LateRunner, pool: BlockPool, tensors: list[torch.Tensor], on_hand_out: Callable[[int], None]
) -> None:
    """Fill each block that `pool` hands out with NaN, after the steps launched before. `on_hand_out` sees it first."""
    allocate = pool.allocate

    def allocate_poisoned() -> int:
        block = allocate()
        on_hand_out(block)
        runner.queue.append(lambda: [tensor[block].fill_(torch.nan) for tensor in tensors])
        return block

    pool.allocate = allocate_poisoned


class LateEngine:
    """Requests by names that the test gives; books checked after every step."""

    def __init__(self, cell: Cell, pools: Pools):
        self.core: EngineCore = LLM(**cell.options(pools)).core
        self.runner = self.core.runner = LateRunner(self.core.runner)
        self.lives: dict[str, deque[Life]] = {}  # not ended, oldest first
        self.num_reused = 0  # blocks handed out while a step in flight still used them for a request that has left
        self.num_discarded = 0  # rows whose result came too late for their request
        for (pool, tensors), blocks_of in zip(pool_tensors(self.core), BLOCKS_OF, strict=True):
            poison_handed_out(self.runner, pool, tensors, partial(self._count_reused, blocks_of))
        self._count_discarded()

    def _count_reused(self, blocks_of: BlocksOf, block: int) -> None:
        flying = [row for step in self.runner.in_flight for row in step.scheduled.rows]
        self.num_reused += any(block in blocks_of(row) for row in flying if not self._is_live(row))

    def _count_discarded(self) -> None:
        update = self.core.scheduler.update

        def counted(scheduled: SchedulerOutput, output: RunnerOutput) -> list:
            self.num_discarded += sum(not self._is_live(row) for row in scheduled.rows)
            return update(scheduled, output)

        self.core.scheduler.update = counted

    def _is_live(self, row: ScheduledRow) -> bool:
        request = self.core.scheduler.requests.get(row.request_id)
        return request is not None and request.admission == row.admission

    def is_in_flight(self, name: str) -> bool:
        return any(row.request_id == name for step in self.runner.in_flight for row in step.scheduled.rows)

    def add(self, name: str, prompt: list[int], **params: Any) -> Life:
        """Greedy, with log-probabilities and no end-of-text, unless `params` say otherwise."""
        chosen = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "logprobs": 3, "seed": 0} | params)
        life = Life(prompt, chosen)
        self.core.add_request(EngineRequest(name, prompt, chosen))
        self.lives.setdefault(name, deque()).append(life)
        return life

    def step(self) -> None:
        for output in self.core.step():
            lives = self.lives[output.request_id]
            assert lives, f"{output.request_id} gets an output after its end"
            lives[0].add(output)
            if output.finish_reason:
                lives.popleft()
        self.core.check()

    def run(self, before_step: Callable[[], Any] = lambda: None) -> None:
        """Until nothing is left; then every block must be free."""
        while self.core.has_work():
            before_step()
            self.step()
        assert not any(self.lives.values())
        for num_free, num_usable in self.core.free_blocks().values():
            assert num_free == num_usable
        assert self.core.stats().fused_copy_mismatches_total == 0
