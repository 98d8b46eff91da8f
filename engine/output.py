"""Standard output and error of a process that waits for nobody who reads them.

A full disk, a closed pipe or a pipe whose reader sleeps costs lines, and never time: a thread writes them, in order,
and what does not fit into `MAX_WAITING_BYTES` is dropped and counted. One thread serves both streams, so a stuck one
also costs lines of the other.
"""

import io
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

MAX_WAITING_BYTES = 1 << 20
LAST_LINES_SECONDS = 1.0  # how long a process that leaves waits for its last lines to be taken


class _Writer:
    """Writes to file descriptors in a thread of its own."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, bytes]] = deque()  # (file descriptor, text); the first is being written
        self._num_bytes = 0
        self._num_dropped = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, fd: int, data: bytes) -> None:
        """Never blocks."""
        with self._changed:
            if self._num_bytes + len(data) > MAX_WAITING_BYTES:
                self._num_dropped += 1
                return
            if self._num_dropped:
                data = b"(%d lines were dropped: nobody took them)\n" % self._num_dropped + data
                self._num_dropped = 0
            self._waiting.append((fd, data))
            self._num_bytes += len(data)
            self._changed.notify_all()

    def wait_empty(self, seconds: float) -> None:
        """Return when all is written, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                fd, data = self._waiting[0]
            try:
                while data:
                    data = data[os.write(fd, data) :]
            except OSError:  # nobody can take it: it is lost
                pass
            with self._changed:
                _, written = self._waiting.popleft()
                self._num_bytes -= len(written)
                self._changed.notify_all()


class _Stream(io.TextIOBase):
    """Hands whole lines, and what is flushed, to the writer."""

    encoding = "utf-8"

    def __init__(self, writer: _Writer, fd: int):
        self._writer, self._fd = writer, fd
        self._line = ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, rest = (self._line + text).rpartition("\n")
            self._line = rest
            self._put(whole + newline)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            self._put(self._line)
            self._line = ""

    def _put(self, text: str) -> None:
        if text:
            self._writer.put(self._fd, text.encode(self.encoding, "backslashreplace"))


@contextmanager
def output_that_never_blocks() -> Iterator[None]:
    """Within it `sys.stdout` and `sys.stderr` are such streams; one that was closed from the start stays closed."""
    writer, (out, err) = _Writer(), (sys.stdout, sys.stderr)
    sys.stdout = out and _Stream(writer, out.fileno())
    sys.stderr = err and _Stream(writer, err.fileno())
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        writer.wait_empty(LAST_LINES_SECONDS)
        sys.stdout, sys.stderr = out, err
