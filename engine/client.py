"""How to talk to an engine in a process of its own.

Owns the process and what it is asked. Knows nothing of HTTP. Every request that is taken in gets exactly one ending: an
output with a finish reason, or an error.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from mambalign.engine.config import EngineConfig
from mambalign.engine.core_process import (
    DEFAULT_CORE,
    HEARTBEAT_SECONDS,
    Abort,
    Add,
    Call,
    Failed,
    FromEngine,
    Hello,
    Outputs,
    Progress,
    Ready,
    Rejected,
    Reply,
    Stop,
    ToEngine,
)
from mambalign.engine.errors import EngineDeadError, EngineError, EngineStalledError, RequestError
from mambalign.engine.mailbox import Mailbox
from mambalign.engine.messages import EngineOutput, EngineRequest, EngineStats
from mambalign.engine.option import ConfigError
from mambalign.engine.request_factory import RequestFactory

STOP_SECONDS = 5.0  # how long the engine process may take to leave once told to
# Threads that wait for one another sleep instead of spinning: on shared cores (a server's clients, a laptop's other
# programs) spinning made steps up to 30 times slower. Read by OpenMP when torch is first imported.
OPENMP_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE"}
LAST_WORDS_SECONDS = 0.1  # how long after its end its last messages may take to be read


class EngineClient:
    """An engine in its own process. Made and used on one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Callable[[str], None] | None = None,
        core: str = DEFAULT_CORE,
        log_level: str = "info",
        stall_seconds: float = 5.0,
    ):
        """`stall_seconds`: how long a process that serves may show no sign of life before its requests are ended."""
        self.ready: Ready | None = None  # what the engine said when it could serve; filled by `start`
        self.factory = RequestFactory(config.model.seed)
        self._config = config
        self._core = core
        self._log_level = log_level
        self._progress = progress
        self.error: EngineDeadError | ConfigError | None = None  # why nothing can run any more
        self.stalled: EngineStalledError | None = None  # until the next sign of life
        self._stall_seconds = stall_seconds
        self._dead = asyncio.Event()
        self._mailboxes: dict[str, Mailbox] = {}  # by request id
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False

    async def start(self) -> Ready:
        """Start the process and wait until it can serve. Raises ConfigError, EngineDeadError."""
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        long_tmp = len(tempfile.gettempdir()) > 60  # a socket's path holds about 100 characters
        self._folder = tempfile.mkdtemp(prefix="mambalign-", dir="/tmp" if long_tmp else None)  # mode 0700
        address = f"ipc://{Path(self._folder) / 'engine.sock'}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._heartbeat, child_end = os.pipe()
        os.set_blocking(self._heartbeat, False)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mambalign.engine.core_process"),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(child_end,),
            env=OPENMP_SETTINGS | os.environ,
        )
        os.close(child_end)
        hello = self._encoder.encode(Hello(address, self._core, child_end, self._config, self._log_level))
        self._process.stdin.write(b"%d\n%b" % (len(hello), hello))
        self._tasks = [asyncio.create_task(run()) for run in (self._receive, self._watch, self._watch_heartbeat)]
        try:
            self.ready = await self._started
        except BaseException:
            await self.shutdown(drain=False)
            raise
        shutil.rmtree(self._folder, ignore_errors=True)  # the two are connected: a killed server leaves no folder
        return self.ready

    @property
    def healthy(self) -> bool:
        """Requests can be run now."""
        return self.ready is not None and self.error is None and self.stalled is None and not self._draining

    @property
    def num_live_requests(self) -> int:
        return len(self._mailboxes)

    async def wait_dead(self) -> str:
        """Return, with the reason, once the engine has died. Never returns after an orderly shutdown."""
        await self._dead.wait()
        return str(self.error)

    async def generate(self, request: EngineRequest | Sequence[EngineRequest]) -> AsyncIterator[EngineOutput]:
        """Run one request, or several side by side; yield their outputs as they come.

        Raises RequestError (can never run), EngineError (failed on the way), EngineDeadError. When the
        consumer goes away (cancelled, closed) whatever still runs is aborted.
        """
        requests = [request] if isinstance(request, EngineRequest) else request
        self._check_alive()
        mailbox = Mailbox()
        live = {r.request_id for r in requests}
        try:
            for r in requests:
                self._mailboxes[r.request_id] = mailbox
                self._send(Add(r))
            while live:
                item = await mailbox.get()
                if isinstance(item, Exception):
                    raise item
                if item.finish_reason:
                    live.discard(item.request_id)
                    self._mailboxes.pop(item.request_id, None)
                if item.finish_reason == "error":
                    raise EngineError(item.error or "the engine failed")
                yield item
        finally:
            for request_id in live:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Stop a request; outputs that are still on their way are dropped. Unknown ids are ignored."""
        if self._mailboxes.pop(request_id, None) is not None and self.error is None:
            self._send(Abort(request_id))

    async def stats(self) -> EngineStats:
        return msgspec.convert(await self._call("stats"), EngineStats)

    async def reset_prefix_cache(self) -> bool:
        """False when running requests still use some of it; the rest is reset."""
        return await self._call("reset_prefix_cache")

    async def check(self) -> None:
        """Raise AssertionError if a pool of the engine is inconsistent."""
        await self._call("check")

    async def free_blocks(self) -> dict[str, tuple[int, int]]:
        """Pool -> (free, total)."""
        return {name: tuple(pair) for name, pair in (await self._call("free_blocks")).items()}

    async def drain(self) -> None:
        """Take no new request and wait until those that run have ended."""
        self._draining = True
        while self._mailboxes and self.error is None:
            await asyncio.sleep(0.02)

    async def shutdown(self, drain: bool = True) -> None:
        """End the process: after the running requests have ended, or at once. Safe to call twice."""
        if not self._tasks:
            return
        if drain:
            await self.drain()
        self._draining = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process.returncode is None:
            self._send(Stop())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS if drain and not self.stalled else 0.5)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._fail(EngineDeadError("the engine was shut down"))
        self._socket.close(linger=0)
        self._context.term()
        os.close(self._heartbeat)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check_alive(self) -> None:
        if self.error or self.stalled:
            raise self.error or self.stalled
        if self.ready is None or self._draining:
            raise EngineDeadError("the engine is shutting down" if self._draining else "the engine is still loading")

    def _send(self, message: ToEngine) -> None:
        self._socket.send(self._encoder.encode(message))  # in order, and at once: no high-water mark

    async def _call(self, method: str) -> Any:
        self._check_alive()
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(Call(call_id, method))
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def _receive(self) -> None:
        while True:
            self._handle(self._decoder.decode(await self._socket.recv()))

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    if mailbox := self._mailboxes.get(output.request_id):
                        mailbox.put(output)
            case Rejected(request_id, text):
                if mailbox := self._mailboxes.pop(request_id, None):
                    mailbox.put(RequestError(text))
            case Reply(call_id, value, error):
                future = self._calls.get(call_id)
                if future is not None and not future.done():
                    future.set_exception(AssertionError(error)) if error else future.set_result(value)
            case Progress(text):
                if self._progress:
                    self._progress(text)
            case Ready():
                if not self._started.done():
                    self._started.set_result(message)
            case Failed(text, is_config_error):
                self._fail(ConfigError(text) if is_config_error else EngineDeadError(text))

    async def _watch(self) -> None:
        """Wait for the process to end by itself, take what it said last, and end every request."""
        code = await self._process.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._fail(EngineDeadError(f"the engine process {how}"))
        self._dead.set()

    async def _watch_heartbeat(self) -> None:
        """End the requests of a process that is stopped, or starved; it may load for as long as it likes.

        Counts looks, not time: while this process is stopped as well (Ctrl-Z and fg), nobody was silent.
        """
        silent_looks = 0
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            is_beating = False
            with contextlib.suppress(BlockingIOError):
                is_beating = bool(os.read(self._heartbeat, 1 << 16))
            if is_beating or self.ready is None:
                silent_looks, self.stalled = 0, None
                continue
            silent_looks += 1
            if self.stalled is None and silent_looks * HEARTBEAT_SECONDS > self._stall_seconds:
                text = f"the engine process has shown no sign of life for {self._stall_seconds:g} s"
                self.stalled = EngineStalledError(text)
                self._end_all(self.stalled)

    def _end_all(self, error: EngineDeadError | ConfigError) -> None:
        """End every request and call with `error`."""
        for mailbox in set(self._mailboxes.values()):
            mailbox.put(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _fail(self, error: EngineDeadError | ConfigError) -> None:
        """Nothing can run any more: end everything. The first reason stands."""
        self.error = self.error or error
        self._end_all(self.error)
        self._mailboxes.clear()
        if not self._started.done():
            self._started.set_exception(self.error)
