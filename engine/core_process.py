"""The engine's own process: one `EngineCore`, one socket to the API side, one loop.

Owns the core and nothing else. It ends in one of three ways: told to (exit 0), the core failed (every live
request gets an error output, the failure is reported, exit 1; 2 for options that cannot be served), or the
API side is gone (exit 1 at once). Ctrl-C and SIGTERM are the API side's business: it drains, then says so here.
"""

import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from mambalign.engine.config import EngineConfig
from mambalign.engine.messages import EngineOutput, EngineRequest
from mambalign.engine.option import ConfigError
from mambalign.engine.output import output_that_never_blocks

DEFAULT_CORE = "mambalign.engine.core:EngineCore"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
HEARTBEAT_SECONDS = 0.5
CALLS = ("stats", "reset_prefix_cache", "check", "free_blocks")


class Hello(msgspec.Struct, frozen=True):
    """First thing on the child's standard input, which then stays open for as long as the API side lives."""

    address: str  # the socket to connect to
    core: str  # "module:callable" that makes the core
    heartbeat_fd: int  # a pipe to write a byte to every HEARTBEAT_SECONDS, whatever the loop does
    config: EngineConfig
    log_level: str  # "info"


class Add(msgspec.Struct, frozen=True, tag=True):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class Call(msgspec.Struct, frozen=True, tag=True):
    """Run one of `CALLS` on the core between two steps; answered by a `Reply` with the same id."""

    call_id: int
    method: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave now. Requests that still run are dropped: the API side drains before it says so."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The core can serve: what the API side has to know of it."""

    plan: list[str]
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    spec_tokens: int
    spec_method: str | None
    runner: str
    conv_layout: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last message of a process that ends by itself."""

    text: str
    is_config_error: bool = False


class Outputs(msgspec.Struct, frozen=True, tag=True):
    outputs: list[EngineOutput]


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """The request can never run; the text names the field and the limit. It gets no other output."""

    request_id: str
    text: str


class Reply(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    value: Any = None
    error: str | None = None


ToEngine = Add | Abort | Call | Stop
FromEngine = Progress | Ready | Failed | Outputs | Rejected | Reply


class EngineLoop:
    """Takes messages in, steps the core, sends outputs out; blocks on the socket while there is no work."""

    def __init__(self, core: Any, socket: zmq.Socket, send: Callable[[FromEngine], None]):
        self.core = core
        self.socket = socket
        self.send = send
        self.decoder = msgspec.msgpack.Decoder(ToEngine)
        self.live: set[str] = set()  # requests that have not got their ending
        self.stopping = False

    def run(self) -> None:
        """Serve until told to stop. Any exception is the core's failure, and the caller's to report."""
        while not self.stopping:
            has_work = self.core.has_work()
            if not has_work or self.socket.poll(0):
                self.handle(self.decoder.decode(self.socket.recv()))
                continue
            outputs = self.core.step()
            if outputs:
                self.live.difference_update(output.request_id for output in outputs if output.finish_reason)
                self.send(Outputs(outputs))

    def handle(self, message: ToEngine) -> None:
        match message:
            case Add(request):
                try:
                    self.core.add_request(request)
                except ValueError as error:
                    self.send(Rejected(request.request_id, str(error)))
                else:
                    self.live.add(request.request_id)
            case Abort(request_id):
                self.core.abort(request_id)
            case Call(call_id, method):
                self.send(self.call(call_id, method))
            case Stop():
                self.stopping = True

    def call(self, call_id: int, method: str) -> Reply:
        assert method in CALLS, method
        try:
            return Reply(call_id, getattr(self.core, method)())
        except AssertionError as error:  # `check` found a pool inconsistent: the caller's news
            return Reply(call_id, error=f"{method} failed: {error}")

    def fail_live(self, text: str) -> None:
        """Give every request that has none an ending."""
        failed = [EngineOutput(live_id, finish_reason="error", error=text) for live_id in self.live]
        self.live.clear()
        if failed:
            self.send(Outputs(failed))


def serve(core: Any, socket: zmq.Socket, send: Callable[[FromEngine], None]) -> int:
    """Run a loaded core to its end. Returns the exit code."""
    send(
        Ready(
            plan=list(core.plan),
            max_model_len=core.max_model_len,
            vocab_size=core.vocab_size,
            eos_token_ids=list(core.eos_token_ids),
            spec_tokens=core.spec_tokens,
            spec_method=core.spec_method,
            runner=core.config.runner.runner,
            conv_layout=core.config.cache.mamba_conv_layout,
        )
    )
    loop = EngineLoop(core, socket, send)
    try:
        loop.run()
    except Exception as error:
        text = f"the engine failed: {type(error).__name__}: {error}"
        loop.fail_live(text)
        send(Failed(text))
        traceback.print_exc()
        return 1
    return 0


def exit_with_parent() -> None:
    """End this process as soon as the API side's end of standard input closes, however that side died."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def beat(fd: int) -> None:
    """Show the API side that this process is not stopped."""
    while True:
        os.write(fd, b".")
        time.sleep(HEARTBEAT_SECONDS)


def main() -> int:
    """Entry point of the process: a length line and a `Hello` on standard input, the rest by socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    size = int(sys.stdin.buffer.readline())
    hello = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=Hello)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    threading.Thread(target=beat, args=(hello.heartbeat_fd,), daemon=True).start()
    with output_that_never_blocks():
        logging.basicConfig(level=hello.log_level.upper(), format=LOG_FORMAT)
        return run(hello)


def run(hello: Hello) -> int:
    """Connect, load, serve. Returns the exit code."""
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # outputs are never dropped, and a slow reader never stalls the loop
    socket.connect(hello.address)
    encoder = msgspec.msgpack.Encoder()

    def send(message: FromEngine) -> None:
        socket.send(encoder.encode(message))

    try:
        module, _, name = hello.core.partition(":")
        make_core = getattr(importlib.import_module(module), name)
        core = make_core(hello.config, lambda text: send(Progress(text)))
    except ConfigError as error:
        send(Failed(str(error), is_config_error=True))
        code = 2
    except MemoryError as error:
        send(Failed(f"the engine could not start: {error or 'not enough memory'}"))
        code = 1
    except Exception as error:
        send(Failed(f"the engine could not start: {type(error).__name__}: {error}"))
        traceback.print_exc()
        code = 1
    else:
        code = serve(core, socket, send)
    socket.close(linger=2000)
    context.term()
    return code


if __name__ == "__main__":
    sys.exit(main())
