"""Many streams at once, half of which leave: nothing is left behind, mixed up, or changed for those who stay."""

import asyncio
import time
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess

from mambalign.engine.checkpoint import DEFAULT_MODEL

NUM_STREAMS = 200
MAX_LEFT_CHUNKS = 6  # a stream that leaves does so before so many


async def read(client: openai.AsyncOpenAI, number: int, *, leaves: bool) -> str:
    """The text of a stream that stays; one that leaves takes a few chunks first, more or fewer."""
    text, prompt = "", f"<slow>stream {number} says {'ab' * (number % 7)};"
    stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=120, stream=True)
    async with stream:
        async for chunk in stream:
            text += chunk.choices[0].text
            if leaves and len(text) > number % 10:
                return text
    return text


async def wait_idle(server: ServerProcess) -> None:
    end = time.monotonic() + 30
    while server.metrics()["num_requests_running"] or server.metrics()["num_requests_waiting"]:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_half_of_two_hundred_streams_leave(fake_model: Path) -> None:
    with ServerProcess(fake_model, "--spec-tokens", "3", program="fake_core.py") as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        texts = await asyncio.gather(*(read(client, i, leaves=i % 2 == 1) for i in range(NUM_STREAMS)))
        for number in range(0, NUM_STREAMS, 2):
            said = f"stream {number} says {'ab' * (number % 7)};"
            num_characters = 120 - -(-120 // (len(said) + 1))  # <slow> is a token without text
            assert texts[number] == (said * 120)[:num_characters]
        await wait_idle(server)
        metrics = server.metrics()
        ended = {r: metrics[f'request_success_total{{finished_reason="{r}"}}'] for r in ("length", "abort", "error")}
        assert ended["length"] + ended["abort"] == NUM_STREAMS and ended["error"] == 0
        assert ended["length"] >= NUM_STREAMS / 2 and ended["abort"] > 0, "a slow client may leave after the end"
        await client.close()
        assert server.stop() == 0


def real_fields(number: int) -> dict[str, object]:
    """Prompts of many lengths that share beginnings; greedy and sampled texts, so that mixed-up rows show."""
    prompt = "import os\nimport sys\n" * (number % 4 * 2) + f"def read_{number}(path, limit={number * 7}):\n"
    return {"model": "default", "prompt": prompt, "max_tokens": 8, "seed": number, "temperature": number % 3 / 2}


async def read_real(client: openai.AsyncOpenAI, number: int) -> str:
    """The whole text of an even stream; an odd one leaves after a few chunks, some before the first."""
    text = ""
    async with await client.completions.create(**real_fields(number), stream=True) as stream:
        num_left = number * 5 % MAX_LEFT_CHUNKS
        async for chunk in stream:
            text += chunk.choices[0].text
            num_left -= 1
            if number % 2 and num_left <= 0:
                break
    return text


@pytest.mark.skipif(not (DEFAULT_MODEL / "config.json").exists(), reason="no model ships here")
async def test_half_of_two_hundred_streams_of_a_model_leave() -> None:
    options = ("--max-model-len", "512", "--cache-memory", "64MiB", "--spec-tokens", "3", "--max-num-seqs", "24")
    with ServerProcess(*options, "--mamba-block-size", "16") as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        stays = range(0, NUM_STREAMS, 2)
        alone = [(await client.completions.create(**real_fields(i))).choices[0].text for i in stays]
        before = server.metrics()
        texts = await asyncio.gather(*(read_real(client, i) for i in range(NUM_STREAMS)))
        assert [texts[i] for i in stays] == alone and len(set(alone)) > len(alone) / 2
        await wait_idle(server)
        after = server.metrics()
        ended = {r: after[f'request_success_total{{finished_reason="{r}"}}'] for r in ("length", "stop", "abort")}
        assert ended["abort"] > 0 and sum(ended.values()) == NUM_STREAMS + len(alone)
        assert after["kv_cache_usage_perc"] == after["mamba_cache_usage_perc"] == 0, "blocks are held by nobody"
        assert after["prefix_cache_hits_total"] > before["prefix_cache_hits_total"]
        await client.close()
        assert server.stop() == 0
