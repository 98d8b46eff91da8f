"""The server as a new user meets it: `serve` with no model, the openai client, and every way in which it can end."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_client import GAUGES
from oracle import Oracle
from server_process import ServerProcess, call, metrics_text, serve_command

BLOCK = 64
SPEC = 3
OPTIONS = [
    *("--mamba-cache-mode", "align", "--spec-tokens", str(SPEC), "--mamba-block-size", str(BLOCK)),
    *("--max-model-len", "1024", "--cache-memory", "160MiB", "--check-fused-copy"),
]
PROMPT = '''class Stack:
    """A last-in, first-out container."""

    def __init__(self):
        self.items = []

    def push(self, item):
'''


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*OPTIONS) as server:
        yield server
        assert server.stop() == 0, server.output


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def wait_idle(server: ServerProcess, seconds: float = 30) -> None:
    """Nothing runs or waits, and no request holds a block of either pool."""
    end = time.monotonic() + seconds
    while any((metrics := server.metrics())[name] for name in GAUGES):
        assert time.monotonic() < end, metrics
        time.sleep(0.05)


def delta(before: dict[str, float], after: dict[str, float], *names: str) -> list[float]:
    return [after[name] - before[name] for name in names]


# a healthy life


def test_start_says_what_one_needs(server: ServerProcess, client: openai.OpenAI) -> None:
    assert call(f"{server.url}/health") == (200, {"status": "ok"})
    for words in (
        "KV pool: ",
        "state pool: ",
        "running requests: up to ",
        f"states kept every {BLOCK} tokens",
        "by mtp",
    ):
        assert words in server.output
    (model,) = client.models.list().data
    assert model.id == "default" and client.models.retrieve("default").id == "default"
    assert "mambalign:spec_decode_num_accepted_tokens_total 0.0" in metrics_text(server.url)


def test_completion_is_transformers_text(client: openai.OpenAI, oracle: Oracle) -> None:
    ids = oracle.tokenizer.encode(PROMPT)
    expected = oracle.expected(ids, 40)
    fields: dict[str, Any] = {
        "model": "default",
        "max_tokens": 40,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    by_text = client.completions.create(prompt=PROMPT, **fields)
    by_ids = client.completions.create(prompt=ids, logprobs=1, **fields)
    text = oracle.tokenizer.decode(expected.token_ids)
    assert by_text.choices[0].text == by_ids.choices[0].text == text
    assert by_ids.choices[0].logprobs.token_logprobs == [entry.logprob for entry in expected.logprobs]
    assert by_text.usage.prompt_tokens == len(ids) and by_text.usage.completion_tokens == 40


def test_chat(client: openai.OpenAI, oracle: Oracle, server: ServerProcess) -> None:
    """Two turns: the second reuses what the first computed, and a stream says what a whole answer says."""
    messages: list[Any] = [{"role": "user", "content": f"Go on with this class.\n{PROMPT}"}]
    fields: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 48}
    first = client.chat.completions.create(messages=messages, **fields)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    reply = first.choices[0].message
    assert reply.role == "assistant" and reply.content
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "Now pop."}]
    second = client.chat.completions.create(messages=messages, **fields)
    ids = call(f"{server.url}/tokenize", {"messages": messages})[1]["tokens"]
    assert second.usage.prompt_tokens == len(ids)
    shared = first.usage.prompt_tokens // BLOCK * BLOCK
    assert shared > 0 and second.usage.prompt_tokens_details.cached_tokens >= shared
    with client.chat.completions.create(messages=messages, stream=True, **fields) as stream:
        parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts) == second.choices[0].message.content and len(parts) > 3
    expected = oracle.expected(ids, second.usage.completion_tokens).token_ids
    assert second.choices[0].message.content == oracle.tokenizer.decode(expected, skip_special_tokens=True)


def test_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "default",
        "prompt": [PROMPT, "import os\nimport sys\n\n\ndef walk("],
        "max_tokens": 50,
        "temperature": 0.9,
        "seed": 11,
        "logprobs": 2,
        "n": 2,
        "stop": ["\n\n\n"],
        "extra_body": {"return_token_ids": True},
    }
    whole = client.completions.create(**fields)
    streamed = [{"text": "", "ids": [], "logprobs": [], "finish": None} for _ in whole.choices]
    usage = None
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **fields):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            mine = streamed[choice.index]
            mine["text"] += choice.text
            mine["ids"] += choice.token_ids
            mine["logprobs"] += choice.logprobs.token_logprobs if choice.logprobs else []
            mine["finish"] = choice.finish_reason
    assert len(whole.choices) == 4
    for choice, mine in zip(whole.choices, streamed, strict=True):
        assert mine["text"] == choice.text and mine["ids"] == choice.token_ids
        assert mine["logprobs"] == choice.logprobs.token_logprobs and mine["finish"] == choice.finish_reason
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_hit_law_usage_and_metrics(client: openai.OpenAI, server: ServerProcess, oracle: Oracle) -> None:
    """The first repeat takes floor((n-1)/B)*B tokens from the cache with drafts on; metrics and usage agree."""
    lengths = [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 17]
    prompts = [oracle.source(m)[:n] for m, n in zip(("csv", "heapq", "string", "shlex", "queue"), lengths, strict=True)]
    for repeat in range(2):
        before = server.metrics()
        answers = [
            client.completions.create(
                model="default", prompt=prompt, max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
            )
            for prompt in prompts
        ]
        after = server.metrics()
        usages = [answer.usage for answer in answers]
        cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
        assert cached == [(n - 1) // BLOCK * BLOCK if repeat else 0 for n in lengths]
        drafts = [usage.completion_tokens_details for usage in usages]
        accepted = sum(one.accepted_prediction_tokens for one in drafts)
        proposed = accepted + sum(one.rejected_prediction_tokens for one in drafts)
        assert delta(
            before,
            after,
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "prompt_tokens_total",
            "generation_tokens_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
        ) == [sum(lengths), sum(cached), sum(lengths), 60 * len(lengths), proposed, accepted]
        num_drafts = after["spec_decode_num_drafts_total"] - before["spec_decode_num_drafts_total"]
        assert 1 + accepted / num_drafts > 2, "mean accepted length"
        done = 'request_success_total{finished_reason="length"}'
        assert delta(before, after, done) == [len(prompts)]
    assert after["fused_copy_mismatches_total"] == 0


def test_a_client_that_leaves_frees_everything(client: openai.OpenAI, server: ServerProcess) -> None:
    before = server.metrics()
    for fields in ({"n": 1}, {"n": 3, "temperature": 1.0, "seed": 1}):
        stream = client.completions.create(
            model="default", prompt=PROMPT, max_tokens=800, stream=True, extra_body={"ignore_eos": True}, **fields
        )
        for _ in zip(range(5), stream, strict=False):
            pass
        assert server.metrics()["num_requests_running"] > 0
        stream.close()
        wait_idle(server)
    after = server.metrics()
    assert delta(before, after, 'request_success_total{finished_reason="abort"}') == [4]
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 4 * 800


def test_200_random_requests_with_aborts(server: ServerProcess, oracle: Oracle, is_thorough: bool) -> None:
    """Of every kind, many at once, a third of them left in the middle; then nothing is held and all is well."""
    num_requests = 1000 if is_thorough else 200
    asyncio.run(send_random_requests(server, oracle, num_requests))
    wait_idle(server)
    assert call(f"{server.url}/health") == (200, {"status": "ok"})
    metrics = server.metrics()
    assert metrics["fused_copy_mismatches_total"] == 0
    assert metrics['request_success_total{finished_reason="error"}'] == 0
    prompt = oracle.source("difflib")[: 2 * BLOCK + 9]
    answer = call(
        f"{server.url}/v1/completions",
        {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True},
    )[1]
    oracle.assert_text(prompt, answer["choices"][0]["token_ids"], None, "after the storm")


async def send_random_requests(server: ServerProcess, oracle: Oracle, num_requests: int) -> None:
    choose = random.Random(5)
    sources = [oracle.source(module) for module in ("argparse", "textwrap", "calendar", "zipfile")]
    plans = []
    for _ in range(num_requests):
        fields: dict[str, Any] = {
            "model": "default",
            "prompt": choose.choice(sources)[: choose.choice((1, 5, 63, 64, 65, 130, 200))],
            "max_tokens": choose.choice((1, 2, 9, 24)),
            "temperature": choose.choice((0.0, 0.0, 0.7, 1.2)),
            "n": choose.choice((1, 1, 1, 2)),
            "extra_body": {"ignore_eos": choose.random() < 0.5, "top_k": choose.choice((0, 20))},
        }
        if choose.random() < 0.3:
            fields |= {"frequency_penalty": 0.5, "presence_penalty": 0.2}
        if choose.random() < 0.2:
            fields |= {"logprobs": 3, "stop": ["return", "\n\n"]}
        plans.append((fields, choose.choice((None, None, 0, 1, 3)), choose.random() < 0.5))
    limit = asyncio.Semaphore(24)
    base = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=300) as client:
        await asyncio.gather(*(send_one(client, limit, *plan) for plan in plans))


async def send_one(
    client: openai.AsyncOpenAI, limit: asyncio.Semaphore, fields: dict[str, Any], leave_after: int | None, stream: bool
) -> None:
    """`leave_after`: chunks of its stream, or 0: at once."""
    async with limit:
        if leave_after == 0:
            task = asyncio.create_task(client.completions.create(**fields))
            await asyncio.sleep(0.02)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif leave_after is None and not stream:
            answer = await client.completions.create(**fields)
            assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
        else:
            async with await client.completions.create(stream=True, **fields) as chunks:
                num_chunks = 0
                async for _ in chunks:
                    num_chunks += 1
                    if num_chunks == leave_after:
                        return


def test_reset_prefix_cache(client: openai.OpenAI, server: ServerProcess, oracle: Oracle) -> None:
    fields: dict[str, Any] = {"model": "default", "prompt": oracle.source("sched")[:100], "max_tokens": 1}
    cached = []
    for reset in (False, False, True, False):
        if reset:
            assert call(f"{server.url}/reset_prefix_cache", {}) == (200, {"reset": True})
        cached.append(client.completions.create(**fields).usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, BLOCK, 0, BLOCK]


# its ends


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_health_is_503_until_it_serves_and_sigterm_drains() -> None:
    port = free_port()
    with ServerProcess("--port", str(port), *OPTIONS) as server:
        server.wait_line("^loading default")
        status, answer = call(f"http://127.0.0.1:{port}/health")
        assert status == 503 and answer["error"]["code"] == "loading"
        assert server.url == f"http://127.0.0.1:{port}"
        assert call(f"{server.url}/health") == (200, {"status": "ok"})
        long = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
        answers = asyncio.run(stop_while_running(server, long))
        assert [len(answer.choices[0].text) > 0 for answer in answers] == [True, True]
        assert [answer.usage.completion_tokens for answer in answers] == [200, 200]
        assert server.wait_exit() == 0


async def stop_while_running(server: ServerProcess, body: dict[str, Any]) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        fields = {name: value for name, value in body.items() if name != "ignore_eos"}
        fields |= {"model": "default", "extra_body": {"ignore_eos": True}}
        tasks = [asyncio.create_task(client.completions.create(**fields)) for _ in range(2)]
        while server.metrics()["num_requests_running"] < 2:
            await asyncio.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*tasks)


def test_a_killed_engine_fails_requests_health_and_the_exit_code() -> None:
    with ServerProcess(*OPTIONS) as server:
        url = server.url
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            fields: dict[str, Any] = {"model": "default", "prompt": PROMPT, "max_tokens": 900}
            fields["extra_body"] = {"ignore_eos": True}
            stream = client.completions.create(stream=True, **fields)
            next(iter(stream))
            os.kill(server.engine_pid(), signal.SIGKILL)
            with pytest.raises(openai.APIError, match="killed by signal 9"):
                for _ in stream:
                    pass
            with pytest.raises(openai.APIError):
                client.completions.create(**fields)
            try:
                assert call(f"{url}/health")[0] == 503
            except OSError:  # it has left already
                pass
        assert server.wait_exit() == 1
        assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--spec-token", "3"], "unknown argument --spec-token; did you mean --spec-tokens?"),
        (["--spec-tokens", "99"], "--spec-tokens 99: must be at most 8"),
        (["--mamba-cache-mode", "all"], "--mamba-cache-mode all cannot be served"),
        (["--mamba-block-size", "100"], "--mamba-block-size 100: must be a multiple of --kv-block-size, which is 16"),
        (["--cache-memory", "1000"], "--cache-memory 1000: one request"),
        (["no/such/../model"], "model 'no/such/../model': no such folder"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line_and_exit_code_2(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [*serve_command(), "--port", "0", *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("serve: error: ") and words in line
