"""What the server refuses because it is too much, and clients that take too long; over HTTP, around the fake core."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess, call

from mambalign.engine.mailbox import MAX_SINGLE_OUTPUTS, Mailbox
from mambalign.engine.messages import EngineOutput
from mambalign.worker.sampling_params import TokenLogprobs

LIMITS = ("--max-live-requests", "130", "--max-body-size", "20000", "--request-timeout", "0.5")
SLOW = {"prompt": "<slow>", "max_tokens": 250}  # 2.5 seconds


@pytest.fixture(scope="module")
def server(fake_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(fake_model, *LIMITS, program="fake_core.py") as server:
        yield server


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return server.url


def wait_idle(server: ServerProcess) -> None:
    end = time.monotonic() + 5
    while server.metrics()["num_requests_running"]:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"prompt": "x" * 20001}, 413, None, "larger than this server takes"),
        ({"prompt": "x" * 257}, 400, "prompt", "the limit is 256"),
        ({"prompt": ["x"] * 131}, 400, "prompt", "131 texts (prompts times choices); at most 130 are taken"),
        ({"prompt": ["x"] * 2, "n": 66}, 400, "prompt", "132 texts"),
        ({"prompt": ["x"] * 2, "best_of": 66}, 400, "prompt", "132 texts"),
        ({"n": 129}, 400, "n", "from 1 to 128"),
        ({"stop": ["x"] * 17}, 400, "stop", "at most 16"),
        ({"stop": ["x" * 1025]}, 400, "stop", "at most 1024 characters"),
        ({"stop_token_ids": [1] * 129}, 400, "stop_token_ids", "at most 128"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias", "at most 1024"),
    ],
)
def test_too_much(url: str, fields: dict, status: int, param: str | None, words: str) -> None:
    got, answer = call(f"{url}/v1/completions", {"prompt": "x"} | fields)
    assert got == status and answer["error"]["param"] == param and words in answer["error"]["message"], answer


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["x", "x" * 2049]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 2049}]}, "messages"),
        ("/v1/responses", {"input": "x" * 2049}, "input"),
    ],
)
def test_a_text_that_cannot_fit_is_never_made_into_tokens(url: str, path: str, body: dict, param: str) -> None:
    """256 tokens of at most 8 characters: "<memory>"."""
    got, answer = call(url + path, body)
    error = answer["error"]
    assert got == 400 and error["param"] == param and error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"{param} has 20") and "256 tokens, which hold at most 2048" in error["message"]


def test_a_text_of_any_length_can_be_counted(url: str) -> None:
    assert call(f"{url}/tokenize", {"prompt": "x" * 2049})[1]["count"] == 2049


def test_full_queue_is_a_429_with_retry_after(server: ServerProcess, url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    thread = threading.Thread(target=call, args=(f"{url}/v1/completions", SLOW | {"n": 128}))
    thread.start()
    while server.metrics()["num_requests_running"] != 128:
        time.sleep(0.01)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=1, n=2).choices
    with pytest.raises(openai.RateLimitError, match="128 of 130 texts are in work") as refusal:
        client.completions.create(model="tiny", prompt="x", n=3)
    assert refusal.value.response.headers["retry-after"] == "1" and refusal.value.code == "queue_full"
    patient = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5)
    assert patient.completions.create(model="tiny", prompt="x", n=3).choices
    thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_aborts(server: ServerProcess, url: str, stream: bool) -> None:
    started = time.monotonic()
    if stream:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="took longer than this server allows"):
            list(client.completions.create(model="tiny", **SLOW, stream=True))
        kinds = [e.type for e in client.responses.create(model="tiny", input="<slow>", stream=True)]
        assert kinds[-1] == "response.failed" and kinds.count("response.failed") == 1
    else:
        status, answer = call(f"{url}/v1/completions", SLOW)
        assert status == 504 and answer["error"]["code"] == "timeout"
    wait_idle(server)
    assert time.monotonic() - started < 2.0


def test_a_client_that_reads_nothing_is_cut_off_and_stalls_nobody(fake_model: Path) -> None:
    """Its answer, 20 MB, is far larger than what sockets hold."""
    with ServerProcess(fake_model, "--write-timeout", "0.3", program="fake_core.py") as server:
        check_cut_off(server, server.url)


def check_cut_off(server: ServerProcess, url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    aborted = 'request_success_total{finished_reason="abort"}'
    before = server.metrics()[aborted]
    body = json.dumps({"prompt": "x", "max_tokens": 250, "n": 120, "logprobs": 20, "stream": True})
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    reader.sendall((head + body).encode())
    started = time.monotonic()
    answer = call(f"{url}/v1/completions", {"prompt": "abc", "max_tokens": 20})[1]
    assert answer["usage"]["completion_tokens"] == 20
    while server.metrics()[aborted] == before:
        assert time.monotonic() - started < 20
        time.sleep(0.02)
    wait_idle(server)
    with pytest.raises(ConnectionResetError):
        while True:
            assert reader.recv(1 << 20)
    reader.close()


def test_a_client_that_reads_slowly_gets_the_whole_text(url: str) -> None:
    body = {"prompt": "abc", "max_tokens": 250, "n": 20, "logprobs": 5, "stream": True, "return_token_ids": True}
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(body))
    response, data = connection.getresponse(), b""
    for part in iter(lambda: response.read(1 << 16), b""):
        data += part
        time.sleep(0.001)
    texts, ids = [""] * 20, [0] * 20
    for line in data.decode().split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
        ids[choice["index"]] += len(choice["token_ids"])
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    assert texts == [("abc" * 84)[:250]] * 20 and ids == [250] * 20


def output(request_id: str, step: int, finished: bool = False) -> EngineOutput:
    return EngineOutput(
        request_id,
        new_text=f"{step},",
        new_token_ids=[step],
        new_logprobs=[TokenLogprobs(-float(step), [], [])],
        prompt_logprobs=[TokenLogprobs(1.0, [], [])] if step == 0 else None,
        finish_reason="stop" if finished else None,
        num_accepted_tokens=step,
    )


@pytest.mark.parametrize("read_every", [0, 3, 1000])
async def test_outputs_of_a_reader_behind_are_joined_in_order(read_every: int) -> None:
    mailbox, got, num_steps, requests = Mailbox(), {}, 2000, ["a", "b", "c"]
    num_items = 0

    async def read() -> None:
        nonlocal num_items
        item = await asyncio.wait_for(mailbox.get(), 1)
        got.setdefault(item.request_id, []).append(item)
        num_items += 1

    for step in range(num_steps):
        for request_id in requests:
            mailbox.put(output(request_id, step, step == num_steps - 1))
        if read_every and step % read_every == 0:
            for _ in range(min(len(mailbox._items), 2 if step % 2 else 5)):
                await read()
    waiting = len(mailbox._items)
    assert waiting <= MAX_SINGLE_OUTPUTS + len(requests) * 2
    for _ in range(waiting):
        await read()
    for outputs in got.values():
        assert [i for o in outputs for i in o.new_token_ids] == list(range(num_steps))
        assert "".join(o.new_text for o in outputs) == "".join(f"{i}," for i in range(num_steps))
        assert [-lp.logprob for o in outputs for lp in o.new_logprobs] == list(range(num_steps))
        assert [o.finish_reason for o in outputs][-1] == "stop" and outputs[-1].num_accepted_tokens == num_steps - 1
        assert [o.prompt_logprobs is not None for o in outputs].count(True) == 1
        assert all(o.finish_reason is None for o in outputs[:-1])
    assert num_items < 3 * num_steps
    mailbox.put(RuntimeError("gone"))
    assert isinstance(await mailbox.get(), RuntimeError)
