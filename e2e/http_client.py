"""A `Client` for a real server, through the openai package: sync or async, streamed or not."""

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
from asks import Answer, Ask, Choice
from cells import Cell, server_cells
from server_process import ServerProcess, call

from mambalign.engine.messages import EngineStats

MODES = ("sync", "async-stream", "async", "sync-stream")
IDLE_SECONDS = 20.0  # how long a server may take to notice that its clients have gone
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "mamba_cache_usage_perc")
MANY = 10**6  # seconds of patience: the tests have a timeout of their own


class HttpClient:
    """Owns a server. `mode` is how plain asks go: "sync" or "async", whole answers or ("-stream") streams.

    Asks that wait for a moment, or leave early, are always streamed by the async client.
    """

    def __init__(self, arguments: Sequence[str], mode: str):
        self.server = ServerProcess(*arguments)
        self.mode = mode

    def run(self, asks: Sequence[Ask]) -> list[Answer]:
        plain = all(ask.start is ask.abort_after is ask.reset_after is None for ask in asks)
        if plain and self.mode.startswith("sync"):
            return self._run_sync(asks)
        return asyncio.run(self._run_async(asks, stream=not plain or self.mode.endswith("stream")))

    # sync

    def _run_sync(self, asks: Sequence[Ask]) -> list[Answer]:
        client = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=MANY)
        with client, ThreadPoolExecutor(len(asks)) as threads:
            return list(threads.map(lambda ask: self._ask_sync(client, ask), asks))

    def _ask_sync(self, client: openai.OpenAI, ask: Ask) -> Answer:
        answer = Answer([Choice() for _ in range(ask.n)])
        if self.mode.endswith("stream"):
            for chunk in client.completions.create(**request_fields(ask, stream=True)):
                add_chunk(answer, chunk)
        else:
            add_chunk(answer, client.completions.create(**request_fields(ask)))
        return answer

    # async

    async def _run_async(self, asks: Sequence[Ask], stream: bool) -> list[Answer]:
        answers = [Answer([Choice() for _ in range(ask.n)]) for ask in asks]
        moments = _Moments(len(asks))
        base = f"{self.server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=MANY) as client:
            async with asyncio.TaskGroup() as tasks:
                for i, ask in enumerate(asks):
                    tasks.create_task(self._ask_async(client, i, ask, answers[i], moments, stream))
        return answers

    async def _ask_async(
        self, client: openai.AsyncOpenAI, i: int, ask: Ask, answer: Answer, moments: "_Moments", stream: bool
    ) -> None:
        if ask.start is not None:
            await moments.wait(ask.start.ask, ask.start.num_tokens)
        await moments.tell(i, 0)
        if ask.abort_after == 0:
            await self._leave_early(client, ask)
        elif stream:
            await self._read_stream(client, i, ask, answer, moments)
        else:
            add_chunk(answer, await client.completions.create(**request_fields(ask)))
        await moments.tell(i, MANY)

    async def _leave_early(self, client: openai.AsyncOpenAI, ask: Ask) -> None:
        """Go away without having read anything; the server may be anywhere then."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.completions.create(**request_fields(ask)), 0.01)

    async def _read_stream(
        self, client: openai.AsyncOpenAI, i: int, ask: Ask, answer: Answer, moments: "_Moments"
    ) -> None:
        num_chunks, has_reset = 0, False
        async with await client.completions.create(**request_fields(ask, stream=True)) as stream:
            async for chunk in stream:
                add_chunk(answer, chunk)
                num_chunks += 1
                await moments.tell(i, answer.num_tokens)
                if ask.reset_after is not None and not has_reset and answer.num_tokens >= ask.reset_after:
                    await asyncio.to_thread(call, f"{self.server.url}/reset_prefix_cache", {})
                    has_reset = True
                if ask.abort_after is not None and num_chunks >= ask.abort_after:
                    return  # leaving the `async with` closes the connection

    # the server

    def stats(self) -> EngineStats:
        metrics = self.server.metrics()
        plain = {name: int(metrics[name]) for name in EngineStats.__struct_fields__ if name in metrics}
        accepted = by_label(metrics, "spec_decode_num_accepted_tokens_per_pos_total", "position")
        return EngineStats(
            **plain,
            spec_decode_accepted_per_position=[accepted[str(i)] for i in range(len(accepted))],
            fused_copy_checks=by_label(metrics, "fused_copy_checks_total", "bias"),
            fused_copy_copies=by_label(metrics, "fused_copy_copies_total", "bias"),
        )

    def reset_prefix_cache(self) -> None:
        assert call(f"{self.server.url}/reset_prefix_cache", {}) == (200, {"reset": True})

    def assert_idle(self) -> None:
        """Every gauge comes back to 0 (clients that leave are noticed a little later), and the server is well."""
        end = time.monotonic() + IDLE_SECONDS
        while busy := {name: value for name, value in self.server.metrics().items() if name in GAUGES and value}:
            assert time.monotonic() < end, f"never idle: {busy}"
            time.sleep(0.02)
        assert call(f"{self.server.url}/health") == (200, {"status": "ok"})

    def close(self) -> None:
        try:
            assert self.server.stop() == 0, self.server.output
        finally:
            self.server.kill()


def open_server(cell: Cell, pools: str) -> HttpClient:
    """A cell's server; the clients' modes go round over the cells."""
    mode = MODES[server_cells().index(cell) % len(MODES)]
    return HttpClient(cell.arguments(cell.pools(pools)), mode)


class _Moments:
    """How far each ask of a run has come, for those that wait for it."""

    def __init__(self, num_asks: int):
        self._num_tokens = [-1] * num_asks
        self._news = asyncio.Condition()

    async def tell(self, ask: int, num_tokens: int) -> None:
        async with self._news:
            self._num_tokens[ask] = max(self._num_tokens[ask], num_tokens)
            self._news.notify_all()

    async def wait(self, ask: int, num_tokens: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self._num_tokens[ask] >= num_tokens)


def by_label(metrics: dict[str, float], name: str, label: str) -> dict[str, int]:
    """The values of one metric, by one of its labels."""
    pattern = re.compile(rf'{name}{{.*{label}="([^"]*)".*}}')
    return {match[1]: int(value) for key, value in metrics.items() if (match := pattern.fullmatch(key))}


def request_fields(ask: Ask, stream: bool = False) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": "default",
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "n": ask.n,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    if ask.seed is not None:
        fields["seed"] = ask.seed
    if ask.logprobs:
        fields["logprobs"] = 2
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


def add_chunk(answer: Answer, chunk: Any) -> None:
    """Add what a whole completion, or a chunk of a stream, brings."""
    for choice in chunk.choices:
        mine = answer.choices[choice.index]
        mine.token_ids += choice.token_ids
        if choice.logprobs is not None:
            mine.logprobs = [*(mine.logprobs or []), *choice.logprobs.token_logprobs]
        mine.finish_reason = choice.finish_reason
    if chunk.usage is not None:
        answer.num_cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        details = chunk.usage.completion_tokens_details
        answer.num_accepted_tokens = details.accepted_prediction_tokens
        answer.num_draft_tokens = details.accepted_prediction_tokens + details.rejected_prediction_tokens
