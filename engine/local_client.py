"""How to talk to an engine in this process."""

from collections.abc import Iterator, Sequence
from typing import Any

from mambalign.engine.errors import EngineError, RequestError
from mambalign.engine.messages import EngineOutput, EngineRequest


class LocalClient:
    """Runs requests on a core in this process, one caller at a time."""

    def __init__(self, core: Any):
        self.core = core

    def generate(self, requests: Sequence[EngineRequest]) -> Iterator[EngineOutput]:
        """Run all to their end, outputs as they come. Raises RequestError (before the first step), EngineError.

        A caller that leaves early (break, Ctrl-C) aborts the rest.
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
                for output in self.core.step():
                    if output.finish_reason:
                        live.discard(output.request_id)
                    if output.finish_reason == "error":
                        raise EngineError(output.error or "the engine failed")
                    yield output
        except (RequestError, EngineError, GeneratorExit, KeyboardInterrupt):
            for request_id in live:
                self.core.abort(request_id)
            while live and self.core.has_work():
                live.difference_update(o.request_id for o in self.core.step() if o.finish_reason)
            raise
