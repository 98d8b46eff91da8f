"""The real scheduler driven against the symbolic runner, step by step, with everything that must hold checked.

`CacheOracle` is the prefix cache without blocks: the set of all prefixes that were ever committed. It says what a
lookup must find as long as nothing was evicted.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from mambalign.engine.block_pool import BlockPool
from mambalign.engine.request import Request, RequestStatus
from mambalign.engine.scheduler import Scheduler
from mambalign.engine.scheduler_limits import SchedulerLimits
from mambalign.engine.tests.cache_watch import CacheWatch
from mambalign.engine.tests.fresh_state import check_fresh
from mambalign.worker.batch import NewRow, RunnerOutput, ScheduledRow, SchedulerOutput
from mambalign.worker.sampling_params import SamplingParams
from mambalign.worker.tests.symbolic_memory import SymbolicLimits, states_of, true_text
from mambalign.worker.tests.symbolic_runner import DraftPlan, SymbolicRunner

VOCAB_SIZE = 3


def no_drafts(request_id: str, num_tokens: int) -> tuple[int, int]:
    return 0, 0


@dataclass
class CacheOracle:
    """All prefixes that were committed, by salt and state; with `chunk_tokens`, as far as they are a prompt."""

    kv_block_tokens: int
    mamba_block_tokens: int
    chunk_tokens: int | None = None
    kv: set[tuple[str, int]] = field(default_factory=set)
    states: set[tuple[str, int]] = field(default_factory=set)
    wanted: dict[str, set[int]] = field(default_factory=dict)  # request -> boundaries that its prefill keeps

    def admit(self, request: Request) -> tuple[int, int]:
        """Tokens of the hit that a request must have, and of the KV match; notes which boundaries it then keeps."""
        size = self.mamba_block_tokens
        states = states_of(request.token_ids, request.num_prompt_tokens, self.chunk_tokens)
        num_tokens = request.num_tokens if self.chunk_tokens is None else request.num_prompt_tokens
        match = 0
        for end in range(self.kv_block_tokens, num_tokens + 1, self.kv_block_tokens):
            if (request.cache_salt, states[end]) not in self.kv:
                break
            match = end
        hit = min(match, request.num_tokens - 1) // size * size
        while hit and (request.cache_salt, states[hit]) not in self.states:
            hit -= size
        last = num_tokens // size * size
        self.wanted[request.request_id] = {last, match // size * size}
        if num_tokens - last < 16:
            self.wanted[request.request_id].add(last - size)
        return hit, match

    def advance(self, request: Request, row: ScheduledRow, n: int, end: int, states: list[int]) -> None:
        """The row's step took its text from n to `end` committed tokens."""
        size, salt = self.mamba_block_tokens, request.cache_salt
        end = end if self.chunk_tokens is None else min(end, request.num_prompt_tokens)
        self.kv.update((salt, states[i]) for i in range(self.kv_block_tokens, end + 1, self.kv_block_tokens))
        kept = {end // size * size} if row.is_decode else self.wanted[request.request_id]
        self.states.update((salt, states[m]) for m in kept if n < m <= end)

    def reset(self) -> None:
        self.kv.clear()
        self.states.clear()


class Launched(NamedTuple):
    """A step that has run, with the results that the scheduler may not know yet."""

    scheduled: SchedulerOutput
    output: RunnerOutput
    spans: dict[str, tuple[int, int]]  # request -> n before and after


class SymbolicEngine:
    """Add, step, abort, reset: a whole engine without a model. Every call checks what can be checked.

    With `limits.schedules_ahead` a step is planned and run before the results of the last one are booked.
    """

    def __init__(self, limits: SchedulerLimits, draft_plan: DraftPlan = no_drafts, conv_width: int = 4):
        self.limits = limits
        self.scheduler = Scheduler(limits, self._append_token)
        symbolic = SymbolicLimits(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            num_spec_tokens=limits.num_spec_tokens,
            conv_width=conv_width,
            kv_block_tokens=limits.kv_block_tokens,
            mamba_block_tokens=limits.mamba_block_tokens,
            num_kv_blocks=limits.num_kv_blocks,
            num_mamba_blocks=limits.num_mamba_blocks,
            num_lookahead_tokens=limits.num_lookahead_tokens,
            schedules_ahead=limits.schedules_ahead,
            vocab_size=VOCAB_SIZE,
            chunk_tokens=limits.chunk_tokens,
        )
        self.runner = SymbolicRunner(symbolic, draft_plan)
        self.oracle = CacheOracle(limits.kv_block_tokens, limits.mamba_block_tokens, limits.chunk_tokens)
        self.stop_after: dict[str, int] = {}  # request id -> tokens of output at which a stop token comes
        self.requests: list[Request] = []
        self.endings: Counter[str] = Counter()
        self.num_evictions = self.num_steps = self.num_steps_ahead = 0
        self.num_replayed = 0  # rows that ran a preempted reply again
        self._launched: deque[Launched] = deque()
        self._admitted = -1  # latest request that ran
        self._cache_watch = CacheWatch(self.scheduler)
        self._sealed: dict[str, dict[int, bytes]] = {"kv": {}, "mamba": {}}
        self._watch(self.scheduler.blocks.kv_pool, self.runner.allocated_kv)
        self._watch(self.scheduler.blocks.mamba_pool, self.runner.allocated_state)

    def _watch(self, pool: BlockPool, allocated: Callable[[int], None]) -> None:
        """Poison every block that is handed out; a cached one may only go when no free one is left."""
        right = pool.allocate

        def allocate() -> int:
            published = pool.published()
            num_idle = sum(not pool.is_held(block) for block in published)
            num_free = pool.num_free
            block = right()
            if block in published:
                self.num_evictions += 1
                assert num_idle == num_free, f"{pool.name}: evicted a cached block while {num_free - num_idle} are free"
            self._sealed[pool.name].pop(block, None)
            allocated(block)
            return block

        pool.allocate = allocate

    # requests

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 1000,
        *,
        seed: int = 0,
        choice: int = 0,
        salt: str = "",
        stop_after: int | None = None,
        needs_host: bool = False,
    ) -> Request:
        """`needs_host`: the next token depends on the text before it, so that the row cannot run ahead of results."""
        penalty = 1.1 if needs_host else 1.0
        request = Request(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=list(prompt),
            params=SamplingParams(max_tokens=max_tokens, seed=seed, repetition_penalty=penalty),
            choice=choice,
            cache_salt=salt,
        )
        if stop_after is not None:
            self.stop_after[request.request_id] = stop_after
        self.scheduler.add_request(request)
        self.requests.append(request)
        return request

    def abort(self, request: Request) -> None:
        ended = self.scheduler.finish(request.request_id, "abort")
        assert (ended is request) == (self.endings[request.request_id] == 0)
        self.endings[request.request_id] += ended is not None
        self.scheduler.check()

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        self.oracle.reset()
        self.scheduler.check()
        assert self.scheduler.blocks.kv_pool.num_cached == self.scheduler.blocks.mamba_pool.num_cached == 0

    def _append_token(self, request: Request, token_id: int) -> bool:
        request.append(token_id)
        if request.num_output_tokens == self.stop_after.get(request.request_id):
            request.finish_reason = "stop"
        elif request.num_tokens == self.scheduler.max_total_tokens(request):
            request.finish_reason = "length"
        assert request.num_tokens <= self.scheduler.max_total_tokens(request)
        return request.finish_reason is not None

    # a step

    def step(self) -> SchedulerOutput:
        """Run one step, and book all but the `schedules_ahead` latest; returns what was scheduled, in batch order."""
        scheduler = self.scheduler
        preemptions = scheduler.counters.preemptions
        scheduled = scheduler.schedule()
        self._check_plan(scheduled, scheduler.counters.preemptions - preemptions)
        for new in scheduled.new_rows:
            self._check_hit(new)
        self.num_steps += 1
        if scheduled.rows:
            self.num_steps_ahead += bool(self._launched)
            self._launched.append(Launched(scheduled, self.runner.execute_model(scheduled), self.runner.spans))
        while len(self._launched) > (self.limits.schedules_ahead and bool(scheduled.rows)):
            self._book_step(self._launched.popleft())
        scheduler.check()
        check_fresh(scheduler, self._cache_watch, self.requests)
        return scheduled

    def has_work(self) -> bool:
        return self.scheduler.has_work() or bool(self._launched)

    def run(self) -> list[SchedulerOutput]:
        """Step until nothing is left."""
        steps = []
        while self.has_work():
            steps.append(self.step())
        return steps

    def generate(self, prompt: list[int], max_tokens: int = 1000, **options) -> Request:
        """One request from beginning to end."""
        request = self.add(prompt, max_tokens, **options)
        while request.status is not RequestStatus.FINISHED:
            self.step()
        return request  # with schedules_ahead, a step of it may still be in flight

    def _check_plan(self, scheduled: SchedulerOutput, num_preemptions: int) -> None:
        limits, scheduler = self.limits, self.scheduler
        assert scheduled.rows or self._launched, "a step that schedules nothing"
        assert sum(row.num_tokens for row in scheduled.rows) <= limits.max_num_batched_tokens
        assert len(scheduled.rows) <= limits.max_num_seqs
        assert len({row.request_id for row in scheduled.rows}) == len(scheduled.rows)
        if not num_preemptions and not self._launched:
            starved = {r.request_id for r in scheduler.running} - {row.request_id for row in scheduled.rows}
            assert not starved, f"running without a row: {starved}"
        for row in scheduled.rows:
            request = scheduler.requests[row.request_id]
            assert request.status is RequestStatus.RUNNING
            assert row.kv_blocks == request.kv_blocks and row.mamba_blocks == request.mamba_blocks
            assert all(map(scheduler.blocks.kv_pool.is_held, row.kv_blocks))
            assert all(map(scheduler.blocks.mamba_pool.is_held, row.mamba_blocks.values()))
            assert len(request.in_flight) == 1 or not (row.is_decode and request.params.needs_history)
            self._check_chunks(row, request)
            if row.is_decode and not limits.schedules_ahead:  # all accepted, and the model's own token, still fit
                assert request.num_tokens + row.num_tokens <= scheduler.max_total_tokens(request)

    def _check_chunks(self, row: ScheduledRow, request: Request) -> None:
        """A row is whole chunks of its prompt, or the prompt's end; or it is of the reply alone."""
        chunk, n, end = self.limits.chunk_tokens, row.num_computed_tokens, row.num_computed_tokens + row.num_tokens
        assert row.num_tokens > 0
        assert row.by_chunk == (chunk is not None and n < request.num_prompt_tokens)
        if row.by_chunk:
            assert not row.is_decode and n % chunk == 0
            assert end == request.num_prompt_tokens or (end < request.num_prompt_tokens and end % chunk == 0)
            assert all(m % chunk == 0 for m in row.boundaries)
        elif chunk is not None:
            assert not row.boundaries, "the state of a reply is asked for"
            self.num_replayed += not row.is_decode

    def _check_hit(self, new: NewRow) -> None:
        request = self.scheduler.requests[new.request_id]
        expected, match = self.oracle.admit(request) if self.limits.enable_prefix_caching else (0, 0)
        if self.num_evictions:
            assert new.num_computed_tokens <= min(match, request.num_tokens - 1)
        else:
            assert new.num_computed_tokens == expected, f"hit {new.num_computed_tokens}, not {expected}"
        if request.num_preemptions == 0:
            assert request.num_cached_tokens == new.num_computed_tokens
            assert self._admitted < self.requests.index(request), "overtaken"
            self._admitted = self.requests.index(request)

    def _book_step(self, launched: Launched) -> None:
        rows = {row.request_id: row for row in launched.scheduled.rows}
        for request, gained, *_ in self.scheduler.update(launched.scheduled, launched.output):
            self._book(request, gained, rows[request.request_id], *launched.spans[request.request_id])
        self._seal()

    def _book(self, request: Request, gained: list[int], row: ScheduledRow, n: int, end: int) -> None:
        """Hold the request against the runner's own books, and tell the oracle."""
        text = self.runner.texts[row.request_id]
        assert request.token_ids == text.token_ids[: request.num_tokens]
        assert request.token_ids[request.num_tokens - len(gained) :] == gained
        if request.status is RequestStatus.FINISHED:
            self.endings[request.request_id] += 1
        else:
            assert request.num_computed_tokens == end
            if not request.in_flight:
                index = self.runner.batch.row_of[row.request_id]
                assert request.running_column == self.runner.batch.mamba_state_idx[index]
        if self.limits.chunk_tokens is not None:
            published = self.scheduler.blocks.kv_pool.published()
            of_reply = request.kv_blocks[request.num_prompt_tokens // self.limits.kv_block_tokens :]
            assert not any(block in published for block in of_reply), "KV of a reply is cached"
        if self.limits.enable_prefix_caching:
            self.oracle.advance(request, row, n, min(end, request.num_tokens), text.states)

    def _seal(self) -> None:
        """Hold what was published in this step against the prefix that its hash stands for."""
        for pool, seal in (
            (self.scheduler.blocks.kv_pool, self.runner.seal_kv),
            (self.scheduler.blocks.mamba_pool, self.runner.seal_state),
        ):
            sealed = self._sealed[pool.name]
            for block, hash in pool.published().items():
                if sealed.get(block) != hash:
                    sealed[block] = hash
                    _, text = self._cache_watch.names[hash]
                    seal(block, states_of(list(text), len(text), self.limits.chunk_tokens), len(text))

    # the end

    def check_idle(self) -> None:
        """Everything ended once, gave everything back, and says what it would have said alone."""
        scheduler = self.scheduler
        assert not scheduler.requests and not scheduler.running and not scheduler.waiting and not self._launched
        scheduler.blocks.kv_pool.check({})
        scheduler.blocks.mamba_pool.check({})
        assert scheduler.blocks.kv_pool.num_free == scheduler.blocks.kv_pool.num_usable
        assert scheduler.blocks.mamba_pool.num_free == scheduler.blocks.mamba_pool.num_usable
        self.runner.check_sealed()
        for request in self.requests:
            assert self.endings[request.request_id] == 1, f"{request.request_id}: {self.endings} endings"
            self._check_text(request)

    def _check_text(self, request: Request) -> None:
        output = request.output_token_ids
        who = (request.prompt_token_ids, request.params, request.choice)
        assert output == true_text(*who, VOCAB_SIZE, len(output), self.limits.chunk_tokens)
        if request.finish_reason == "length":
            assert request.num_tokens == self.scheduler.max_total_tokens(request)
        elif request.finish_reason == "stop":
            assert request.num_output_tokens == self.stop_after[request.request_id]
        else:
            assert request.finish_reason == "abort"
