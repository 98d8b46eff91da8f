"""The real engine behind the real server: what the fake core cannot show of aborts, drain and death."""

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from server_process import ServerProcess, call

from mambalign.engine.checkpoint import DEFAULT_MODEL

OPTIONS = ("--max-model-len", "1024", "--cache-memory", "64MiB", "--spec-tokens", "3")
LONG = {"prompt": "import os\n" * 60, "max_tokens": 800, "ignore_eos": True, "temperature": 0}

pytestmark = pytest.mark.skipif(not (DEFAULT_MODEL / "config.json").exists(), reason="no model ships here")


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*OPTIONS) as server:
        yield server


def wait_running(server: ServerProcess, count: int) -> None:
    end = time.monotonic() + 30
    while server.metrics()["num_requests_running"] != count:
        assert time.monotonic() < end
        time.sleep(0.01)


def in_background(url: str, body: dict) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call(f"{url}/v1/completions", body)))
    thread.start()
    return thread, answers


def test_leaving_frees_everything_and_sigterm_drains(server: ServerProcess) -> None:
    url = server.url
    status, answer = call(f"{url}/v1/completions", LONG | {"max_tokens": 9, "n": 2})
    assert status == 200 and answer["usage"]["completion_tokens"] == 18
    assert answer["choices"][0]["text"] == answer["choices"][1]["text"] != ""
    for stream in (False, True):
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        connection.request("POST", "/v1/completions", json.dumps(LONG | {"stream": stream, "n": 3}))
        wait_running(server, 3)
        connection.close()
        wait_running(server, 0)
    after = server.metrics()
    assert after["kv_cache_usage_perc"] == after["mamba_cache_usage_perc"] == 0
    assert after['request_success_total{finished_reason="abort"}'] == 6
    thread, answers = in_background(url, LONG | {"max_tokens": 200})
    wait_running(server, 1)
    server.process.send_signal(signal.SIGTERM)
    thread.join(60)
    assert answers[0][0] == 200 and answers[0][1]["usage"]["completion_tokens"] == 200
    assert answers[0][1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    assert server.wait_exit() == 0


def test_killed_engine(server: ServerProcess) -> None:
    url = server.url
    thread, answers = in_background(url, LONG)
    wait_running(server, 1)
    os.kill(server.engine_pid(), signal.SIGKILL)
    thread.join(20)
    assert answers[0][0] == 503 and call(f"{url}/health")[0] == 503
    assert server.wait_exit() == 1
