"""The engine process and its client, around the fake core: endings, deaths, aborts, calls."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_core import CORE, CRASH, DIE, ERROR, SLOW

from mambalign.engine.client import EngineClient
from mambalign.engine.config import EngineConfig
from mambalign.engine.errors import EngineDeadError, EngineError, RequestError
from mambalign.engine.messages import EngineOutput
from mambalign.engine.option import ConfigError
from mambalign.worker.sampling_params import SamplingParams

PROMPT = [100, 101, 102]


@contextlib.asynccontextmanager
async def started(model: Path, **options: object) -> AsyncIterator[EngineClient]:
    lines: list[str] = []
    config = EngineConfig.from_options(model=str(model), **options)
    client = EngineClient(config, progress=lines.append, core=CORE)
    ready = await client.start()
    assert lines == ["loading nothing"] and ready.plan == ["pools: none"]
    try:
        yield client
    finally:
        await client.shutdown(drain=False)


async def collect(client: EngineClient, prompt: list[int], **fields: object) -> list[EngineOutput]:
    requests = client.factory.split(prompt, SamplingParams(**fields))
    return [output async for output in client.generate(requests)]


async def free(client: EngineClient) -> int:
    return (await client.free_blocks())["kv"][0]


async def test_life_of_requests(fake_model: Path) -> None:
    async with started(fake_model, spec_tokens=1) as client:
        assert client.healthy and client.ready.spec_method == "mtp"
        assert not Path(client._folder).exists(), "whoever kills the server finds nothing left of it"
        outputs = await collect(client, PROMPT, max_tokens=5)
        assert [o.new_token_ids for o in outputs] == [[100, 101], [102, 100], [101]]
        assert [o.finish_reason for o in outputs] == [None, None, "length"]
        many = await asyncio.gather(*(collect(client, [100 + i], max_tokens=3, n=2) for i in range(20)))
        for i, outputs in enumerate(many):
            assert {t for o in outputs for t in o.new_token_ids} == {100 + i}
            assert sum(o.finish_reason == "length" for o in outputs) == 2
        stats = await client.stats()
        assert stats.generation_tokens_total == 5 + 20 * 2 * 3 and stats.num_requests_running == 0
        assert await client.reset_prefix_cache() is True
        await client.check()
        assert client.num_live_requests == 0


async def test_a_request_that_can_never_run_is_the_callers_error(fake_model: Path) -> None:
    async with started(fake_model) as client:
        with pytest.raises(RequestError, match="prompt must hold 1 to 255"):
            await collect(client, [], max_tokens=5)
        with pytest.raises(EngineError, match="told to fail"):
            await collect(client, [ERROR], max_tokens=5)
        assert len(await collect(client, PROMPT, max_tokens=1)) == 1


async def test_consumer_that_leaves_aborts(fake_model: Path) -> None:
    async with started(fake_model) as client:
        task = asyncio.create_task(collect(client, [SLOW], max_tokens=200, n=3))
        while await free(client) != 7:
            await asyncio.sleep(0.01)
        with pytest.raises(AssertionError, match="requests are left"):
            await client.check()
        assert await client.reset_prefix_cache() is False
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await free(client) == 10  # aborts travel in order before the call
        async with contextlib.aclosing(client.generate(client.factory.split([SLOW], SamplingParams()))) as outputs:
            await anext(outputs)
        assert await free(client) == 10 and client.num_live_requests == 0


@pytest.mark.parametrize(("token", "words"), [(CRASH, "told to crash"), (DIE, "killed by signal 9")])
async def test_engine_death_ends_every_request(fake_model: Path, token: int, words: str) -> None:
    async with started(fake_model) as client:
        bystander = asyncio.create_task(collect(client, [SLOW], max_tokens=200))
        while await free(client) == 10:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=words):
            await collect(client, [token])
        with pytest.raises(EngineError, match=words):
            await bystander
        assert words in await asyncio.wait_for(client.wait_dead(), 5)
        assert not client.healthy and client._process.returncode == (1 if token == CRASH else -9)
        with pytest.raises(EngineDeadError, match=words):
            await collect(client, PROMPT)
        with pytest.raises(EngineDeadError, match=words):
            await client.stats()


async def test_death_while_idle(fake_model: Path) -> None:
    async with started(fake_model) as client:
        os.kill(client._process.pid, signal.SIGKILL)
        assert "signal 9" in await asyncio.wait_for(client.wait_dead(), 5)


async def test_start_refuses_with_the_engines_words(fake_model: Path) -> None:
    config = EngineConfig.from_options(model=str(fake_model), cache_memory=10)
    with pytest.raises(ConfigError, match="--cache-memory 10"):
        await EngineClient(config, core=CORE).start()
    with pytest.raises(EngineDeadError, match="no_such_module"):
        await EngineClient(EngineConfig(), core="no_such_module:Core").start()


async def test_drain_finishes_what_runs(fake_model: Path) -> None:
    async with started(fake_model) as client:
        running = asyncio.create_task(collect(client, [SLOW], max_tokens=20))
        while await free(client) == 10:
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(client.shutdown(drain=True))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await collect(client, PROMPT)
        assert (await running)[-1].finish_reason == "length"
        await stopping
        assert client._process.returncode == 0 and not Path(client._folder).exists()


async def test_engine_process_follows_its_parent(fake_model: Path) -> None:
    async with started(fake_model) as client:
        client._process.stdin.close()  # what the death of this process would do
        assert "exit code 1" in await asyncio.wait_for(client.wait_dead(), 5)


def test_split_gives_one_seed_to_all_choices() -> None:
    from mambalign.engine.request_factory import RequestFactory

    first = RequestFactory(0).split(PROMPT, SamplingParams(n=3))
    again = RequestFactory(0).split(PROMPT, SamplingParams(n=3))
    other = RequestFactory(1).split(PROMPT, SamplingParams(n=3))
    assert [r.choice for r in first] == [0, 1, 2] and len({r.request_id for r in first}) == 3
    assert {r.params.seed for r in first} == {again[0].params.seed} != {other[0].params.seed}
    assert {r.params.n for r in first} == {1}
    assert RequestFactory(0).split(PROMPT, SamplingParams(seed=5))[0].params.seed == 5
