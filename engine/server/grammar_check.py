"""Whether a grammar can be used, found out beside the engine.

The engine compiles in its one thread, where every request waits for it. Some small grammars, such as an `allOf` of
twenty patterns, take llguidance hours; nothing can stop it, so a thread that takes too long is left alone.
"""

import asyncio
import contextlib
import threading
from collections import OrderedDict

import msgspec

from mambalign.engine.server.errors import ApiError, value_error
from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.sampling_params import StructuredOutputs

COMPILE_SECONDS = 10.0
NUM_AT_ONCE = 2
MAX_KNOWN = 1024


class GrammarCheck:
    """Remembers the latest grammars that are known to compile."""

    def __init__(self, compiler: GrammarCompiler, seconds: float = COMPILE_SECONDS):
        self._compiler = compiler
        self._seconds = seconds
        self._slots = asyncio.Semaphore(NUM_AT_ONCE)
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, wanted: StructuredOutputs) -> None:
        """Raise ApiError: 400 for a grammar that cannot be compiled in time, 429 while others that cannot take all
        places."""
        key = msgspec.json.encode(wanted)
        if key in self._known:
            self._known.move_to_end(key)
            return
        try:
            async with asyncio.timeout(self._seconds):
                await self._slots.acquire()
        except TimeoutError:
            text = f"{wanted.field}: other grammars are being compiled: try again later"
            raise ApiError(429, text, param=wanted.field, code="queue_full", kind="rate_limit_error") from None
        try:
            async with asyncio.timeout(self._seconds):
                error = await asyncio.shield(self._compile(wanted))
        except TimeoutError:
            text = f"{wanted.field}: the grammar takes more than {self._seconds:g} s to compile: make it simpler"
            raise ApiError(400, text, param=wanted.field, code="grammar_too_slow") from None
        if error is not None:
            raise value_error(error)
        self._known[key] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _compile(self, wanted: StructuredOutputs) -> asyncio.Future[ValueError | None]:
        """What is wrong with it; gives the slot back in the end."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[ValueError | None] = loop.create_future()
        result.add_done_callback(lambda _: self._slots.release())

        def run() -> None:
            error = None
            try:
                self._compiler.make(wanted)
            except ValueError as raised:
                error = raised
            except BaseException as raised:  # a panic of llguidance's, which would end the engine
                error = ValueError(f"{wanted.field}: the grammar cannot be used: {raised}")
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(result.set_result, error)

        threading.Thread(target=run, daemon=True).start()
        return result
