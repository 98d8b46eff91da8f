"""Start, readiness, drain, and death of the server process."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_core import STEP_SECONDS
from server_process import ServerProcess, call, metrics_text

SLOW_BODY = {"prompt": "<slow>", "max_tokens": 100}  # without drafts: 100 steps


@pytest.fixture
def server(fake_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(fake_model, program="fake_core.py") as server:
        yield server


class Background:
    """One HTTP call in a thread."""

    def __init__(self, url: str, body: dict):
        self.answer: tuple[int, object] | None = None
        self._thread = threading.Thread(target=self._run, args=(url, body))
        self._thread.start()

    def _run(self, url: str, body: dict) -> None:
        with contextlib.suppress(http.client.RemoteDisconnected):  # then there is no answer
            self.answer = call(url, body)

    def join(self) -> tuple[int, object]:
        self._thread.join(20)
        return self.answer


def wait_running(url: str) -> None:
    while "mambalign:num_requests_running 1.0" not in metrics_text(url):
        time.sleep(0.005)


def test_start_tells_what_happens_and_sigterm_drains(server: ServerProcess) -> None:
    url = server.url
    for line in ("loading tiny from /", "  loading nothing", "  pools: none", f"  curl {url}/v1/completions"):
        assert line in server.output
    running = Background(f"{url}/v1/completions", SLOW_BODY)
    wait_running(url)
    server.process.send_signal(signal.SIGTERM)
    server.wait_line(r"finishing 1 request\(s\) first")
    with pytest.raises(urllib.error.URLError):  # takes no new connections
        call(f"{url}/health")
    status, answer = running.join()
    assert status == 200 and answer["usage"]["completion_tokens"] == 100
    assert server.wait_exit() == 0 and server.output.endswith("stopped\n")


def test_the_printed_curl_line_works(server: ServerProcess) -> None:
    url = server.url
    line = server.wait_line(r"  (curl .*)")[1]
    answer = json.loads(subprocess.run(line, shell=True, capture_output=True, check=True).stdout)
    assert answer["usage"]["completion_tokens"] == 64 and url in line
    server.process.send_signal(signal.SIGINT)
    assert server.wait_exit() == 0


def test_second_ctrl_c_quits_at_once(server: ServerProcess) -> None:
    url = server.url
    engine = server.engine_pid()
    running = Background(f"{url}/v1/completions", {"prompt": "<slow>" * 50, "max_tokens": 200})
    wait_running(url)
    server.process.send_signal(signal.SIGINT)
    server.wait_line("Ctrl-C again")
    server.process.send_signal(signal.SIGINT)
    start = time.monotonic()
    assert server.wait_exit() == 130 and time.monotonic() - start < 200 * STEP_SECONDS / 2
    end = time.monotonic() + 5
    while Path(f"/proc/{engine}").exists():  # the engine follows
        assert time.monotonic() < end
        time.sleep(0.01)
    assert running.join() is None


def test_killed_engine_fails_requests_health_and_the_server(server: ServerProcess) -> None:
    url = server.url
    body = json.dumps(SLOW_BODY | {"stream": True}).encode()
    headers = {"Content-Type": "application/json"}
    stream = urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=10)
    running = Background(f"{url}/v1/completions", SLOW_BODY)
    time.sleep(0.05)
    os.kill(server.engine_pid(), signal.SIGKILL)
    status, answer = running.join()
    assert status == 503 and "killed by signal 9" in answer["error"]["message"]
    events = [line for line in stream.read().decode().splitlines() if line]
    assert "killed by signal 9" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    assert call(f"{url}/health")[0] == 503
    assert call(f"{url}/v1/completions", SLOW_BODY)[0] == 503
    assert call(f"{url}/metrics")[0] == 200
    assert server.wait_exit() == 1 and "killed by signal 9" in server.output


def test_exception_in_the_engine_fails_the_server(server: ServerProcess) -> None:
    url = server.url
    status, answer = call(f"{url}/v1/completions", {"prompt": "<crash>"})
    assert status == 500 and "told to crash" in answer["error"]["message"]
    assert server.wait_exit() == 1 and "RuntimeError: told to crash" in server.output


def test_health_is_503_while_loading_and_sigterm_stops_it(fake_model: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ServerProcess(fake_model, "--port", str(port), program="fake_core.py") as server:
        server.wait_line("loading tiny")
        status, answer = call(f"http://127.0.0.1:{port}/health")
        assert status == 503 and answer["error"]["code"] == "loading"
        assert call(f"http://127.0.0.1:{port}/v1/completions", SLOW_BODY)[0] == 503
        assert "mambalign:generation_tokens_total 0.0" in metrics_text(f"http://127.0.0.1:{port}")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0 and "stopped while loading" in server.output


def test_refusals_are_one_line(fake_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, code, words in [
            (("--port", port), 1, f"serve: error: cannot listen on 127.0.0.1 port {port}"),
            (("--cache-memory", "10"), 2, "serve: error: --cache-memory 10: at least 1000 bytes"),
        ]:
            server = ServerProcess(fake_model, *options, program="fake_core.py")
            assert server.wait_exit() == code
            assert server.lines[-1].startswith(words) and "Traceback" not in server.output


def test_wrong_options_are_refused_before_torch_is_imported(fake_model: Path) -> None:
    code = (
        "import sys; from mambalign.engine.cli import serve_main\n"
        "try: serve_main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules and 'aiohttp' not in sys.modules"
    )
    for options, words in [
        (["--help"], "--mamba-cache-mode none|align"),
        (["--version"], "mambalign "),
        (["--spec-tokens", "9"], "serve: error: --spec-tokens 9: must be at most 8"),
        (["--spec-token", "3"], "serve: error: unknown argument --spec-token; did you mean --spec-tokens?"),
        (["--mamba-cache-mode", "all"], "serve: error: --mamba-cache-mode all cannot be served"),
        (["--cache-memory", "lots"], "'lots' is not a number of bytes"),
        (["--port", "70000"], "serve: error: --port 70000: must be at most 65535"),
        (["/no/such/folder"], "serve: error: model '/no/such/folder': no such folder"),
        ([str(fake_model), "--max-model-len", "999"], "serve: error: --max-model-len 999: at most 256 for tiny"),
    ]:
        result = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True)
        refused = "error" in words or "number of bytes" in words
        assert words in (result.stderr if refused else result.stdout)
        assert result.returncode == (2 if refused else 0), result.stderr
        if refused:
            assert len(result.stderr.splitlines()) == 1
