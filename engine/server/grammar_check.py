"""Whether a grammar can be used, found out beside the engine.

The engine compiles in its one thread, where every request waits for it. Some small grammars, such as an `allOf` of
twenty patterns, take llguidance hours, and some make it end its process; so each is tried in another process first.
"""

import asyncio
import signal
import sys
from collections import OrderedDict

import msgspec

from mambalign.engine.server.errors import ApiError, value_error
from mambalign.engine.server.grammar_process import Vocabulary
from mambalign.worker.sampling_params import StructuredOutputs

COMPILE_SECONDS = 3.0  # as long may the engine stand still for one, then
MAX_KNOWN = 1024


class GrammarCheck:
    """Remembers the latest grammars that are known to compile. Its process starts with the first grammar."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()  # held by the grammar that is tried
        self._known: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, wanted: StructuredOutputs) -> None:
        """Raise ApiError: 400 for a grammar that cannot be compiled in time, 429 while others are, one by one."""
        key = msgspec.json.encode(wanted)
        if key in self._known:
            self._known.move_to_end(key)
            return
        try:
            async with asyncio.timeout(self._vocabulary.seconds):
                await self._turn.acquire()
        except TimeoutError:
            text = f"{wanted.field}: other grammars are being compiled: try again later"
            raise ApiError(429, text, param=wanted.field, code="queue_full", kind="rate_limit_error") from None
        try:
            error = await self._try(key, wanted.field)
        except BaseException:  # such as a client that has left: its answer would be taken for the next one's
            await self.close()
            raise
        finally:
            self._turn.release()
        if error is not None:
            raise value_error(ValueError(error))
        self._known[key] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def _try(self, grammar: bytes, field: str) -> str | None:
        """What is wrong with it. Raises ApiError when that is not found out in time."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "mambalign.engine.server.grammar_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            self._process.stdin.write(msgspec.json.encode(self._vocabulary) + b"\n")
        self._process.stdin.write(grammar + b"\n")
        if answer := await self._process.stdout.readline():
            return msgspec.json.decode(answer, type=str | None)
        code = await self._process.wait()
        if code == -signal.SIGALRM:
            text = f"{field}: the grammar takes more than {self._vocabulary.seconds:g} s to compile: make it simpler"
            raise ApiError(400, text, param=field, code="grammar_too_slow")
        return f"{field}: the grammar cannot be used: its compiler ended with exit code {code}"

    async def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
