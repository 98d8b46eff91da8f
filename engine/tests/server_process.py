"""A server in its own process, for tests that talk HTTP to it: started as a user would, or around another core."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_SECONDS = 120.0  # a loaded machine imports torch twice


def serve_command() -> list[str]:
    """The `serve` of this Python's environment; its module, where no script was installed."""
    script = Path(sys.executable).parent / "serve"
    return [str(script)] if script.exists() else [sys.executable, "-m", "mambalign.engine.cli", "serve"]


class ServerProcess:
    """`serve` with these arguments, on a free port unless they name one. `output` is all that it has printed.

    `program`: a file of this folder to run in its place. Leaving the context kills what is left of it.
    """

    def __init__(self, *arguments: str | Path, program: str | None = None):
        command = serve_command() if program is None else [sys.executable, Path(__file__).parent / program]
        self.process = subprocess.Popen(
            [*command, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._url: str | None = None

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def _read(self) -> None:
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        """`http://host:port`; waits until the server has said all that it says at its start, and takes requests."""
        if self._url is None:
            self._url = self.wait_line(r"^serving \S+ at (https?://\S+)/v1.*\n  curl .*\n")[1]
        return self._url

    def wait_line(self, pattern: str, seconds: float = START_SECONDS) -> re.Match[str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if match := re.search(pattern, self.output, re.MULTILINE):
                return match
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"no line like {pattern!r} in:\n{self.output}")

    def engine_pid(self) -> int:
        """The one child of the server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def metrics(self) -> dict[str, float]:
        """`/metrics`, by name (and labels, as they are written) without the prefix and the model's name."""
        lines = [line for line in metrics_text(self.url).splitlines() if line.startswith("mambalign:")]
        pairs = (line.removeprefix("mambalign:").rsplit(" ", 1) for line in lines)
        return {name: float(value) for name, value in pairs}

    def stop(self, seconds: float = 60) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait_exit(seconds)

    def wait_exit(self, seconds: float = 60) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def kill(self) -> None:
        """The process, and with it the one that it started; nothing happens when both have ended."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)


def metrics_text(url: str) -> str:
    """What `/metrics` of a server says, without the model's name."""
    status, text = call(f"{url}/metrics")
    assert status == 200, text
    return re.sub(r'\{model_name="[^"]*"\}|model_name="[^"]*",|,model_name="[^"]*"', "", text)


def call(url: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """GET, or POST with a body (JSON, or bytes as they are); the status and the decoded answer."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | (headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()
