"""A server in its own process, around the fake core or the real one, for tests that talk HTTP to it."""

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


class ServerProcess:
    """`python fake_core.py MODEL --port 0 ...`; with no model the real `serve` on the model that ships.

    `wait_url` returns once it can serve and says where. `program`: a file of this folder to run on that model instead.
    """

    def __init__(self, model: Path | None, *options: str, program: str | None = None):
        folder = Path(__file__).parent
        real = ["-m", "mambalign.engine.cli", "serve"] if program is None else [str(folder / program)]
        command = real if model is None else [str(folder / "fake_core.py"), str(model)]
        self.process = subprocess.Popen(
            [sys.executable, *command, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_line(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if match := re.search(pattern, self.output):
                return match
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"no line like {pattern!r} in:\n{self.output}")

    def wait_url(self) -> str:
        return self.wait_line(r"serving \S+ at (http://\S+)/v1")[1]

    def engine_pid(self) -> int:
        """The one child of the server."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def wait_exit(self, seconds: float = 20) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


def call(url: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """GET, or POST with a body (JSON, or bytes as they are); the status and the decoded answer."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | (headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()
