"""`mambalign chat` as a user meets it: through a pipe, and in a terminal where Ctrl-C is pressed."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_core import make_checkpoint
from server_process import ServerProcess

COMMAND = [sys.executable, "-m", "mambalign.engine.cli", "chat"]
SECONDS = 60.0  # for anything to happen: the machine may be loaded


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", max_len=40_000)
    with ServerProcess(folder, "--spec-tokens", "1", program="fake_core.py") as server:
        yield server


def talk(url: str, said: str, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--url", url, *options]
    environment = {k: v for k, v in os.environ.items() if k != "MAMBALIGN_API_KEY"} | environ
    return subprocess.run(command, input=said, env=environment, capture_output=True, text=True, timeout=SECONDS)


def test_turns_of_a_pipe(server: ServerProcess) -> None:
    said = "{say:one:say}\n\n{say:two:say}\n/reset\n{say:one:say}\n/exit\n{say:never:say}\n"
    done = talk(f"{server.url}/v1", said, "--system", "Be brief.", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    # The fake engine says what the first mark of a conversation tells it to: in the second turn that is the first's.
    assert done.stdout == "one\none\none\n"
    costs = re.findall(r"^\[4 tokens, \d+ a second; (\d+) of (\d+) prompt tokens cached; 3 of 4 drafts accepted\]$",
                       done.stderr, re.MULTILINE)  # fmt: skip
    num_prompt = [int(prompt) for _, prompt in costs]
    assert [int(cached) for cached, _ in costs] == [0, 0, num_prompt[0] - 1], "after /reset the first prompt is known"
    assert num_prompt[1] - num_prompt[0] == len("one\n[user]{say:two:say}\n[assistant]")
    assert num_prompt[0] == len("[system]Be brief.\n[user]{say:one:say}\n[assistant]")


def test_quiet_and_limits(server: ServerProcess) -> None:
    done = talk(server.url, "{say:a long answer:say}\n", "--max-tokens", "6", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a long\n", "")
    done = talk(server.url, "{say:a long answer:say}\n", "--max-tokens", "6")
    assert done.stderr.startswith("[cut off at its limit; 6 tokens, ")


def test_raw_text(server: ServerProcess) -> None:
    done = talk(server.url, "  ab\n", "--completions", "--max-tokens", "6")
    assert done.stdout == "  ab  \n", "neither a template nor a history"


def test_no_server_here() -> None:
    done = talk("http://127.0.0.1:9", "hi\n")  # a port that nobody may listen on
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "chat: error: no server at http://127.0.0.1:9 (Connection refused): start one with `serve`, or give --url\n"
    )
    done = talk("nowhere", "hi\n")
    assert done.returncode == 1 and "is no address of a server" in done.stderr


def test_refusals(server: ServerProcess, tmp_path: Path) -> None:
    done = talk(server.url, "hi\n", "--model", "other")
    assert done.returncode == 1 and "model 'other' is not served here" in done.stderr
    done = talk(server.url, "hi\n", "--max-tokens", "50000")
    assert done.returncode == 1 and "leave room for" in done.stderr and "; /reset begins" in done.stderr
    done = talk(server.url, "<error>\n{say:more:say}\n")
    assert done.returncode == 1 and "told to fail" in done.stderr and done.stdout == ""
    plain = make_checkpoint(tmp_path / "plain", chat_template=None)
    with ServerProcess(plain, "--api-key", "first,second", program="fake_core.py") as other:
        done = talk(other.url, "hi\n", "--api-key", "third")
        assert done.returncode == 1 and "refuses this key: give one by --api-key" in done.stderr
        done = talk(other.url, "hi\n", MAMBALIGN_API_KEY="second,first")
        assert done.returncode == 1 and "no chat template" in done.stderr and "--completions" in done.stderr
        done = talk(other.url, "hi\n", "--completions", "--max-tokens", "2", "--api-key", "first")
        assert (done.returncode, done.stdout) == (0, "hi\n")


class Terminal:
    """A program in a terminal of its own: what it shows, and keys to press."""

    def __init__(self, command: list[str]):
        self._master, slave = pty.openpty()

        def enter() -> None:
            os.login_tty(slave)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that a shell runs in the background ignore it

        self.process = subprocess.Popen(command, env=os.environ | {"TERM": "dumb"}, preexec_fn=enter)
        os.close(slave)
        self.shown, self._seen = "", 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 4096):
                self.shown += data.decode(errors="replace")
        except OSError:  # the program has left its terminal
            pass

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait(self, pattern: str, seconds: float = SECONDS) -> None:
        """Until it is shown, behind what was waited for before."""
        end = time.monotonic() + seconds
        while not (match := re.compile(pattern).search(self.shown, self._seen)):
            if time.monotonic() >= end:
                break
            time.sleep(0.01)
        else:
            self._seen = match.end()
            return
        raise AssertionError(f"no {pattern!r} in:\n{self.shown[self._seen :]}")

    def press_until(self, keys: str, pattern: str) -> None:
        """Again and again: readline may be on its way to its next key, where it does not hear of an interrupt."""
        for _ in range(int(SECONDS)):
            self.press(keys)
            try:
                return self.wait(pattern, 1.0)
            except AssertionError:
                continue
        self.wait(pattern, 0.0)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(SECONDS)
        os.close(self._master)


def test_a_terminal(server: ServerProcess) -> None:
    terminal = Terminal([*COMMAND, "--url", server.url, "--max-tokens", "30000"])
    try:
        terminal.wait("tiny at http")
        terminal.wait("> ")
        terminal.press("<slow>abc\n")
        terminal.wait(r"\[user\]abc")  # the answer has begun, and would take minutes
        terminal.press("\x03")
        terminal.wait(r"\[stopped\]")
        end = time.monotonic() + SECONDS
        while server.metrics()["num_requests_running"]:
            assert time.monotonic() < end, "the answer was not stopped in the server"
            time.sleep(0.05)
        terminal.wait("> ")
        terminal.press("half a line")
        terminal.wait("half a line")
        terminal.press_until("\x03", "> ")  # drops it
        terminal.press("/reset\n")
        terminal.wait("> ")
        terminal.press("{say:\x16\x1bhello:say}\n")  # Ctrl-V Escape: a control character, which the answer repeats
        terminal.wait("\n\N{REPLACEMENT CHARACTER}hello\r\n")
        terminal.wait(r"\[\d+ tokens, \d+ a second; ")
        terminal.wait("> ")
        terminal.press("\x04")
        assert terminal.process.wait(SECONDS) == 0
    finally:
        terminal.close()
