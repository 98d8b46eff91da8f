"""What the world does to a server: stopped engines, full disks, broken sockets, bombs. One clear ending each."""

import contextlib
import gzip
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fake_core import NO_MEMORY_SEED
from server_process import ServerProcess, call

PROMPT = "<slow>"  # tokens come one after the other
LONG = {"prompt": PROMPT, "max_tokens": 200, "stream": True}


@pytest.fixture(scope="module")
def server(fake_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(fake_model, "--engine-timeout", "4", "--read-timeout", "1", program="fake_core.py") as server:
        yield server
        assert server.process.poll() is None, server.output
        assert call(f"{server.url}/v1/completions", {"prompt": "abc", "max_tokens": 3})[0] == 200
        assert server.stop() == 0
        assert "Traceback" not in server.output


def connect(server: ServerProcess) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


def post(server: ServerProcess, body: dict | bytes, **headers: str) -> socket.socket:
    """Send a completion, and leave the answer to the caller."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    headers = {"Content_Length": str(len(data))} | headers
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    sender = connect(server)
    sender.sendall("\r\n".join([*lines, "", ""]).encode() + data)
    return sender


def read_all(connection: socket.socket) -> bytes:
    """Until the other side closes, or resets."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.02)


def test_a_stopped_engine_ends_its_requests_and_may_go_on(server: ServerProcess) -> None:
    streams = [post(server, LONG) for _ in range(3)]
    assert all(stream.recv(1 << 16) for stream in streams)
    answers: list[tuple[int, object]] = []
    asked = LONG | {"stream": False}
    whole = threading.Thread(target=lambda: answers.append(call(f"{server.url}/v1/completions", asked)))
    whole.start()
    wait_until(lambda: server.metrics()["num_requests_running"] == 4)
    os.kill(server.engine_pid(), signal.SIGSTOP)
    started = time.monotonic()
    try:
        whole.join(60)
        assert time.monotonic() - started < 30
        (status, answer) = answers[0]
        assert status == 503 and "no sign of life for 4 s" in answer["error"]["message"]
        for stream in streams:
            stream.settimeout(60)
            text = stream.recv(1 << 20).decode()
            while "[DONE]" not in text and '"error"' not in text:
                text += stream.recv(1 << 20).decode()
            assert "no sign of life" in text and "[DONE]" not in text
            stream.close()
        assert call(f"{server.url}/health")[0] == 503
        assert call(f"{server.url}/metrics")[0] == 200
        status, answer = call(f"{server.url}/v1/completions", {"prompt": "abc"})
        assert status == 503 and answer["error"]["code"] == "engine_stalled"
    finally:
        os.kill(server.engine_pid(), signal.SIGCONT)
    wait_until(lambda: call(f"{server.url}/health")[0] == 200)
    wait_until(lambda: server.metrics()["num_requests_running"] == 0)


def test_calls_to_a_stopped_engine_end_and_so_does_its_server(fake_model: Path) -> None:
    """A call that waited for ever would keep a drained stop from ending."""
    with ServerProcess(fake_model, "--engine-timeout", "2", program="fake_core.py") as server:
        url, pid = server.url, server.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        status, answer = call(f"{url}/reset_prefix_cache", {})
        assert status == 503 and "no sign of life" in answer["error"]["message"]
        assert server.stop() == 0, server.output


def test_a_server_stopped_with_its_engine_goes_on_with_it(fake_model: Path) -> None:
    """Ctrl-Z and fg: the engine's silence is counted only while the server itself runs."""
    with ServerProcess(fake_model, "--engine-timeout", "6", program="fake_core.py") as server:
        asked = {"prompt": "<slow>abc", "max_tokens": 200}
        url, pids = server.url, (server.process.pid, server.engine_pid())
        answers: list[tuple[int, object]] = []
        whole = threading.Thread(target=lambda: answers.append(call(f"{url}/v1/completions", asked)))
        whole.start()
        wait_until(lambda: server.metrics()["num_requests_running"] == 1)
        for pid in reversed(pids):  # the engine first: the server has then read its last beat
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.6)
        time.sleep(7)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)
        whole.join(60)
        (status, answer) = answers[0]
        assert status == 200 and answer["usage"]["completion_tokens"] == 200
        assert call(f"{url}/health")[0] == 200


def test_resets_in_the_middle_of_a_stream_touch_nobody_else(server: ServerProcess) -> None:
    asked = {"prompt": "<slow>abcdefg", "max_tokens": 60}
    alone = call(f"{server.url}/v1/completions", asked)[1]["choices"]
    answers: list[tuple[int, object]] = []
    others = [
        threading.Thread(target=lambda: answers.append(call(f"{server.url}/v1/completions", asked))) for _ in range(3)
    ]
    for thread in others:
        thread.start()
    for _ in range(8):
        stream = post(server, LONG)
        assert stream.recv(1 << 16)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
        stream.close()
    for thread in others:
        thread.join(60)
    assert [(status, answer["choices"]) for status, answer in answers] == [(200, alone)] * 3
    wait_until(lambda: server.metrics()["num_requests_running"] == 0)


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-"],
    ids=["nothing", "half a line", "half a header"],
)
def test_a_connection_that_never_says_its_request_is_closed(server: ServerProcess, sent: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        read_all(connection)  # returns: it was closed


def test_half_a_body_is_a_408(server: ServerProcess) -> None:
    with post(server, b'{"prompt": "a', Content_Length="500") as connection:
        answer = read_all(connection).decode()
    assert answer.startswith("HTTP/1.1 408 ") and "did not come within 1 s" in answer


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS greeting
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["tls", "version", "long line", "chunk", "negative", "two lengths"],
)
def test_what_is_no_http(server: ServerProcess, sent: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        assert read_all(connection).split()[1] == b"400"


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (gzip.compress(b'{"prompt": "' + b"a" * (80 << 20)), {"Content_Encoding": "gzip"}, 413),
        (b"\x1f\x8bnot gzip", {"Content_Encoding": "gzip"}, 400),
        (b'{"prompt": "a"}', {"Content_Encoding": "gzip"}, 400),
        (b'{"prompt": ' + b"[" * 200_000, {}, 400),
        (b'{"prompt": "\xff\xfe"}', {}, 400),
        (b'{"prompt": "a", "temperature": NaN}', {}, 400),
        (b'{"prompt": "a", "temperature": 1e999}', {}, 400),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", {}, 400),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', {}, 400),
    ],
    ids=["bomb", "no gzip", "text for gzip", "deep", "utf8", "nan", "infinity", "digits", "surrogate"],
)
def test_bodies_that_mean_harm(server: ServerProcess, body: bytes, headers: dict, status: int) -> None:
    with post(server, body, Connection="close", **headers) as connection:
        answer = read_all(connection).decode()
    assert answer.startswith(f"HTTP/1.1 {status} "), answer[:300]
    assert "error" in json.loads(answer.partition("\r\n\r\n")[2])


@pytest.mark.parametrize("depth", [900, 940, 960, 970, 975, 980, 985, 990, 995, 1000, 1100])
def test_bodies_as_deep_as_can_be_read(server: ServerProcess, depth: int) -> None:
    """Wherever on its way one is too deep: a 400."""
    deep = "[" * depth + "]" * depth
    schema = '{"items":' * depth + "{}" + "}" * depth
    made = {"id": "x", "type": "function", "function": {"name": "f", "arguments": f'{{"a":{deep}}}'}}
    call_of_deep = json.dumps({"role": "assistant", "tool_calls": [made]})
    for path, body in [
        ("completions", f'{{"prompt": "x", "structured_outputs": {{"json": {schema}}}}}'),
        ("chat/completions", f'{{"messages": [], "metadata": {deep}}}'),
        ("chat/completions", f'{{"max_tokens": 1, "messages": [{call_of_deep}]}}'),
    ]:
        status, answer = call(f"{server.url}/v1/{path}", body.encode())
        assert status in (200, 400), answer


@contextlib.contextmanager
def useless_log(kind: str) -> Iterator[int]:
    """A file descriptor to write to that takes nothing."""
    if kind == "full disk":
        fds = [os.open("/dev/full", os.O_WRONLY)]
    else:
        fds = list(reversed(os.pipe()))
    if kind == "closed pipe":
        os.close(fds.pop())
    if kind == "unread pipe":
        os.set_blocking(fds[0], False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(fds[0], b"x" * 4096)
        os.set_blocking(fds[0], True)
    try:
        yield fds[0]
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("end", ["crash", "stop"])
@pytest.mark.parametrize("kind", ["full disk", "closed pipe", "unread pipe"])
def test_a_log_that_nobody_takes_stops_nothing(fake_model: Path, kind: str, end: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, Path(__file__).parent / "fake_core.py", fake_model, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, process.returncode
        with contextlib.suppress(OSError, http.client.HTTPException):
            return call(f"{url}/health")[0] == 200
        return False

    with useless_log(kind) as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(is_up, 120)
            for _ in range(3):
                assert call(f"{url}/v1/completions", {"prompt": "abc", "max_tokens": 3})[0] == 200
            if end == "crash":
                status, answer = call(f"{url}/v1/completions", {"prompt": "<crash>"})
                assert status == 500 and "told to crash" in answer["error"]["message"]
            else:
                process.send_signal(signal.SIGTERM)
            assert process.wait(60) == (1 if end == "crash" else 0)
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("word", ["<memory>", "<start>"])
def test_out_of_memory(fake_model: Path, word: str) -> None:
    with ServerProcess(
        fake_model, *(["--seed", str(NO_MEMORY_SEED)] if word == "<start>" else []), program="fake_core.py"
    ) as server:
        if word == "<start>":
            assert server.wait_exit() == 1
            assert server.lines[-1] == "serve: error: the engine could not start: no memory left\n"
            assert "Traceback" not in server.output
        else:
            status, answer = call(f"{server.url}/v1/completions", {"prompt": word})
            assert status == 500 and "MemoryError: no memory left" in answer["error"]["message"]
            assert server.wait_exit() == 1
