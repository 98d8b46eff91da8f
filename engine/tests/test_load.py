"""Many streams at once, half of which leave: nothing is left behind, mixed up, or changed for those who stay."""

import asyncio
import time
from pathlib import Path

import openai
from server_process import ServerProcess

NUM_STREAMS = 200


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


async def test_half_of_two_hundred_streams_leave(fake_model: Path) -> None:
    with ServerProcess(fake_model, "--spec-tokens", "3", program="fake_core.py") as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        texts = await asyncio.gather(*(read(client, i, leaves=i % 2 == 1) for i in range(NUM_STREAMS)))
        for number in range(0, NUM_STREAMS, 2):
            said = f"stream {number} says {'ab' * (number % 7)};"
            num_characters = 120 - -(-120 // (len(said) + 1))  # <slow> is a token without text
            assert texts[number] == (said * 120)[:num_characters]
        end = time.monotonic() + 5
        while server.metrics()["num_requests_running"]:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        metrics = server.metrics()
        ended = {r: metrics[f'request_success_total{{finished_reason="{r}"}}'] for r in ("length", "abort", "error")}
        assert ended["length"] + ended["abort"] == NUM_STREAMS and ended["error"] == 0
        assert ended["length"] >= NUM_STREAMS / 2 and ended["abort"] > 0, "a slow client may leave after the end"
        await client.close()
        assert server.stop() == 0
