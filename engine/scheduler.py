"""Decides what runs in a step, and books what it did. Owns the requests; touches no tensor.

A step is `schedule() -> run -> update()`. Running requests go first, in the order of their admission, then waiting
ones while budget, rows and blocks last. A running request that finds no block preempts the youngest; the oldest can
always run, because start-up refuses pools in which one request alone would not fit.

With `chunk_tokens` a row is either a piece of its prompt, cut between chunks, or tokens of its reply, and what covers a
token of a reply is not cached: as part of a later prompt it would be computed by chunks, to other bits.

With `schedules_ahead` (runner V2) one more step may be planned while one is in flight: what is known of a request then
is its `Outlook`. Nobody is preempted while a step is in flight; when blocks run out, the next step waits until there is
none.
"""

from collections import deque
from collections.abc import Callable

from mambalign.engine.request import InFlight, Outlook, Request, RequestStatus
from mambalign.engine.request_blocks import RequestBlocks
from mambalign.engine.scheduler_counters import SchedulerCounters
from mambalign.engine.scheduler_limits import SchedulerLimits
from mambalign.worker.batch import UNKNOWN_TOKEN, NewRow, RowResult, RunnerOutput, ScheduledRow, SchedulerOutput
from mambalign.worker.mamba_columns import next_column

AppendToken = Callable[[Request, int], bool]


class Scheduler:
    """See the module's text. `append_token(request, token_id)` adds a token to the text and says if that ended it."""

    def __init__(self, limits: SchedulerLimits, append_token: AppendToken):
        self.limits = limits
        self.append_token = append_token
        self.blocks = RequestBlocks(limits)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters = SchedulerCounters(accepted_per_position=[0] * limits.num_spec_tokens)
        self._removed: list[str] = []  # left the runner since the last step
        self._num_admissions = 0
        self._num_in_flight = 0  # steps planned and not booked
        self._drain = False  # plan nothing until no step is in flight

    # requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError when its id is in use or it could never run."""
        limit = self.limits.max_model_len
        if request.request_id in self.requests:
            raise ValueError(f"request_id: {request.request_id!r} is in use")
        if not request.prompt_token_ids:
            raise ValueError("prompt: must have at least one token")
        if request.num_prompt_tokens >= limit:
            raise ValueError(
                f"prompt: {request.num_prompt_tokens} tokens leave no room for output within {limit} (max_model_len)"
            )
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish(self, request_id: str, reason: str) -> Request | None:
        """End a request now, in whatever state; None when it has ended already."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._removed.append(request_id)
        else:
            self.waiting.remove(request)
        request.finish_reason = request.finish_reason or reason
        request.status = RequestStatus.FINISHED
        self.blocks.release(request)
        return request

    def has_work(self) -> bool:
        return bool(self.requests)

    def max_total_tokens(self, request: Request) -> int:
        """Longest text, prompt included, that the request may reach."""
        return min(request.num_prompt_tokens + request.params.max_tokens, self.limits.max_model_len)

    # schedule

    def schedule(self) -> SchedulerOutput:
        """Plan a step. Every row has its blocks; with a request alive and no step in flight, at least one row runs."""
        output = SchedulerOutput(rows=[])
        if not (self._drain and self._num_in_flight):
            self._drain = False
            num_preemptions = self.counters.preemptions
            budget = self._schedule_running(output, self.limits.max_num_batched_tokens)
            if self.counters.preemptions == num_preemptions and not self._drain:
                self._schedule_waiting(output, budget)  # a preempted request would come straight back
        if output.rows:
            output.removed, self._removed = self._removed, []
            self._num_in_flight += 1
        assert output.rows or self._num_in_flight or not self.requests, "a step that schedules nothing"
        return output

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        draft_budget = self._draft_budget(budget)
        for request in list(self.running):
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older one
            outlook = request.outlook(self.limits.mamba_block_tokens)
            if request.in_flight and not self._may_run_ahead(request, outlook):
                continue
            token_ids = self._next_tokens(request, outlook, budget, draft_budget)
            if not token_ids:
                return 0
            if not self._make_room(request, outlook, len(token_ids)):
                break
            budget -= len(token_ids)
            if outlook.is_decode:
                draft_budget -= len(token_ids) - 1
            output.rows.append(self._row(request, outlook, token_ids))
            if not output.rows[-1].samples:
                return 0  # the rest is less than a chunk, or of another kind: nobody overtakes the request
        return budget

    def _make_room(self, request: Request, outlook: Outlook, num_tokens: int) -> bool:
        """Allocate for a running request, preempting younger ones; False when it has to wait or is the victim."""
        while not self.blocks.allocate(request, outlook, num_tokens):
            if self._num_in_flight:
                self._drain = True
                return False
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _may_run_ahead(self, request: Request, outlook: Outlook) -> bool:
        """Not if the result in flight may end the text, or the next token depends on it through the host."""
        params = request.params
        return outlook.num_tokens < self.max_total_tokens(request) and not (outlook.is_decode and params.needs_host)

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            hit = self.blocks.admit(request)
            outlook = request.outlook(self.limits.mamba_block_tokens)
            token_ids = self._next_tokens(request, outlook, budget, 0)
            if not (token_ids and self.blocks.fits(request) and self.blocks.allocate(request, outlook, len(token_ids))):
                self.blocks.release(request)
                return
            self.waiting.popleft()
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            self._num_admissions += 1
            request.admission = self._num_admissions
            if request.num_cached_tokens is None:  # not resumed: only the first admission answers to the hit law
                self.counters.count_prompt(request, hit.num_tokens, self.blocks.miss_cause(request, hit))
            budget -= len(token_ids)
            output.new_rows.append(self._new_row(request))
            output.rows.append(self._row(request, outlook, token_ids))
            if not output.rows[-1].samples:
                return

    def _draft_budget(self, budget: int) -> int:
        """Drafts use what one token for every row leaves; half of the step is kept for prompts, if there are any.

        A whole chunk at least, so that a prompt goes on in every step.
        """
        block_tokens = self.limits.mamba_block_tokens
        prompts_pending = bool(self.waiting) or any(not r.outlook(block_tokens).is_decode for r in self.running)
        for_prompts = max(budget // 2, self.limits.chunk_tokens or 0) if prompts_pending else 0
        return max(0, budget - len(self.running) - for_prompts)

    def _next_tokens(self, request: Request, outlook: Outlook, budget: int, draft_budget: int) -> list[int]:
        n = outlook.least
        if not outlook.is_decode:
            return request.token_ids[n : self._prefill_end(request, n, budget)]
        room = self.max_total_tokens(request) - outlook.num_tokens - 1  # the step adds one token more than drafts
        num_drafts = max(0, min(room, draft_budget, budget - 1))
        if self.limits.schedules_ahead:
            return [UNKNOWN_TOKEN] * (1 + min(num_drafts, self.limits.num_spec_tokens))
        return request.token_ids[n:] + request.draft_token_ids[:num_drafts]

    def _prefill_end(self, request: Request, n: int, budget: int) -> int:
        """Where the piece of the known text ends that is next. By chunks: at the end of one, or of the prompt.

        A reply that is run again after a preemption is never in one piece with its prompt. It may end at n: then
        `budget` is less than a chunk.
        """
        chunk, prompt = self.limits.chunk_tokens, request.num_prompt_tokens
        if chunk is None or n >= prompt:
            return n + budget
        return prompt if prompt - n <= budget else n + budget // chunk * chunk

    def _preempt(self, request: Request) -> None:
        """Take everything from a running request; it starts over, from the cache if it can, as the next to run."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self._removed.append(request.request_id)
        self.blocks.release(request)

    # what the runner sees

    def _new_row(self, request: Request) -> NewRow:
        return NewRow(
            request_id=request.request_id,
            params=request.params,
            choice=request.choice,
            num_prompt_tokens=request.num_prompt_tokens,
            token_ids=list(request.token_ids),
            num_computed_tokens=request.num_computed_tokens,
        )

    def _row(self, request: Request, outlook: Outlook, token_ids: list[int]) -> ScheduledRow:
        """Describe a row, and note it as in flight."""
        n, is_decode = outlook.least, outlook.is_decode
        end = n + len(token_ids)
        ends_inside = end < request.num_tokens and not is_decode
        request.in_flight.append(InFlight(len(token_ids), is_decode, not ends_inside))
        return ScheduledRow(
            request_id=request.request_id,
            admission=request.admission,
            num_computed_tokens=n,
            token_ids=token_ids,
            is_decode=is_decode,
            kv_blocks=list(request.kv_blocks),
            mamba_blocks=dict(request.mamba_blocks),
            boundaries=[] if is_decode else request.boundaries_within(n, end),
            next_token_id=request.token_ids[end] if ends_inside else None,
            by_chunk=self.limits.chunk_tokens is not None and end <= request.num_prompt_tokens,
        )

    # update

    def update(self, scheduled: SchedulerOutput, output: RunnerOutput) -> list[tuple[Request, list[int], RowResult]]:
        """Book the oldest step in flight; returns each live row's request, the tokens its text gained, the result.

        Only here are blocks published: their contents are written and committed. A result that comes too late, for a
        request that has ended or was admitted anew, is dropped.
        """
        self._num_in_flight -= 1
        gained = []
        for row, result in zip(scheduled.rows, output.results, strict=True):
            assert row.request_id == result.request_id
            request = self.requests.get(row.request_id)
            if request is not None and request.admission == row.admission:
                gained.append((request, self._advance(request, row, result), result))
        return gained

    def _advance(self, request: Request, row: ScheduledRow, result: RowResult) -> list[int]:
        request.in_flight.popleft()
        n, size = request.num_computed_tokens, self.limits.mamba_block_tokens
        assert n == row.num_computed_tokens or (self.limits.schedules_ahead and row.is_decode)
        num_final = len(result.token_ids) if row.is_decode else row.num_tokens
        known = len(request.prompt_logprobs) - n  # after a preemption
        request.prompt_logprobs += result.prompt_logprobs[max(0, known) :]
        request.running_column = next_column(request.running_column, n, row.num_tokens, size)
        request.num_computed_tokens = n + num_final
        kept, finished = self._append_tokens(request, result.token_ids)
        if row.is_decode:
            self.counters.count_drafts(request, result.num_draft_tokens, min(len(result.token_ids) - 1, len(kept)))
        if self.limits.enable_prefix_caching:
            self.blocks.publish(request, row, n, num_final)
        if finished:
            self.finish(request.request_id, request.finish_reason or "stop")
        else:
            request.draft_token_ids = list(result.draft_token_ids)
            self.blocks.release_behind(request)
        return kept

    def _append_tokens(self, request: Request, token_ids: list[int]) -> tuple[list[int], bool]:
        for i, token_id in enumerate(token_ids):
            self.counters.generation_tokens += 1
            if self.append_token(request, token_id):
                return token_ids[: i + 1], True
        return token_ids, False

    # the whole

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False when running requests still hold some of their blocks."""
        self.blocks.cache.reset()
        return not self.running

    def check(self) -> None:
        """Walk the blocks and every request; raises AssertionError on the first contradiction."""
        self.blocks.check(self.requests.values())
        for request in self.waiting:
            assert request.status is RequestStatus.WAITING and not request.kv_blocks and not request.mamba_blocks
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens < request.num_tokens
        assert len(self.waiting) + len(self.running) == len(self.requests)
