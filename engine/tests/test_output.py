"""Output that waits for nobody: what is taken comes whole and in order, what is not taken is counted."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mambalign.engine import output


@contextmanager
def output_to_a_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end to read from. Not a fixture: pytest puts its own streams back before a test's body runs."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb"), os.fdopen(writer, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        patch.setattr(output, "LAST_LINES_SECONDS", 60)
        yield reader


def test_lines_of_both_streams_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with output_to_a_pipe(monkeypatch) as pipe:
        with output.output_that_never_blocks():
            for i in range(50):
                print(f"line {i}", file=(sys.stdout, sys.stderr)[i % 2])
            print("half a pair \ud800", end="")
        expected = "".join(f"line {i}\n" for i in range(50)) + "half a pair \\ud800"
        assert os.read(pipe, 1 << 16).decode() == expected


def test_what_nobody_takes_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "LAST_LINES_SECONDS", 60)
    num_lines, line = 3 * output.MAX_WAITING_BYTES // 1000, "x" * 999 + "\n"
    with output_to_a_pipe(monkeypatch) as pipe, output.output_that_never_blocks():
        for _ in range(num_lines):
            sys.stderr.write(line)  # returns, though nothing is read
        got = b""
        while got.count(b"\n") < output.MAX_WAITING_BYTES // 1000:
            got += os.read(pipe, 1 << 16)
        print("at last")
        while not got.endswith(b"at last\n"):
            got += os.read(pipe, 1 << 16)
    *lines, last = got.decode().splitlines()
    others = [each for each in lines if each != line[:-1]]
    told = [re.fullmatch(r"\((\d+) lines were dropped: nobody took them\)", each) for each in others]
    assert all(told) and last == "at last"  # told more than once when the pipe takes a line in between
    assert told and len(lines) - len(told) + sum(int(match[1]) for match in told) == num_lines


def test_a_stream_that_is_closed_from_the_start_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with output_to_a_pipe(monkeypatch) as pipe:
        monkeypatch.setattr(sys, "stdout", None)
        with output.output_that_never_blocks():
            assert sys.stdout is None
            print("to nobody")
            print("to somebody", file=sys.stderr)
        assert os.read(pipe, 1 << 16) == b"to somebody\n"
