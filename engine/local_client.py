"""How to talk to an engine in this process."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mambalign.engine.errors import EngineDeadError, EngineError, RequestError
from mambalign.engine.messages import EngineOutput, EngineRequest


class LocalClient:
    """Runs requests on a core in this process, one caller at a time."""

    def __init__(self, core: Any):
        self.core = core
        self._failure: str | None = None  # of a step that did not come to its end: the core's books are wrong since

    def generate(self, requests: Sequence[EngineRequest]) -> Iterator[EngineOutput]:
        """Run all to their end, outputs as they come. Raises RequestError (before the first step), EngineError, and
        EngineDeadError after a step that failed in whatever way.

        A caller that leaves early (close, Ctrl-C, any other exception) aborts the rest.
        """
        live: set[str] = set()
        try:
            for request in requests:
                try:
                    self.core.add_request(request)
                except ValueError as error:
                    raise RequestError(str(error)) from error
                live.add(request.request_id)
            while live:
                for output in self._step():
                    if output.request_id not in live:
                        continue  # the ending of one that an earlier caller left
                    if output.finish_reason:
                        live.discard(output.request_id)
                    if output.finish_reason == "error":
                        raise EngineError(output.error or "the engine failed")
                    yield output
        finally:
            self._abort(live)

    def _abort(self, live: set[str]) -> None:
        for request_id in live:
            self.core.abort(request_id)
        while live and self._failure is None and self.core.has_work():
            live.difference_update(o.request_id for o in self._step() if o.finish_reason)

    def _step(self) -> list[EngineOutput]:
        if self._failure is not None:
            raise EngineDeadError(f"the engine failed in an earlier step ({self._failure}): make a new LLM")
        with interrupts_held():
            try:
                return self.core.step()
            except BaseException as error:
                self._failure = f"{type(error).__name__}: {error}"
                raise


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A Ctrl-C within it takes effect at its end; a second one at once."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    is_held = False

    def hold(number: int, frame: Any) -> None:
        nonlocal is_held
        if is_held:
            handler(number, frame)
        is_held = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if is_held:
        handler(signal.SIGINT, None)
