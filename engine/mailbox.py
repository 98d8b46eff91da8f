"""Where the outputs of one caller's requests wait for it. A caller that falls behind gets fewer and larger outputs."""

import asyncio
from collections import deque

import msgspec

from mambalign.engine.messages import EngineOutput

MAX_SINGLE_OUTPUTS = 256  # that wait as they came; from there on those of one request are joined


class _Joined:
    """Several outputs of one request, in parts."""

    def __init__(self, first: EngineOutput):
        self.outputs = [first]

    def output(self) -> EngineOutput:
        outputs = self.outputs
        logprobs = [entry for o in outputs for entry in o.new_logprobs or []]
        return msgspec.structs.replace(
            outputs[-1],
            new_text="".join(o.new_text for o in outputs),
            new_token_ids=[token_id for o in outputs for token_id in o.new_token_ids],
            new_logprobs=logprobs if any(o.new_logprobs is not None for o in outputs) else None,
            prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
        )

    def add(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        if len(self.outputs) == MAX_SINGLE_OUTPUTS:
            self.outputs = [self.output()]


class Mailbox:
    """An unbounded queue whose size is that of the texts in it, not of the steps that made them."""

    def __init__(self) -> None:
        self._items: deque[EngineOutput | Exception | _Joined] = deque()
        self._joined: dict[str, _Joined] = {}  # by request id: where its next output may be added
        self._arrived = asyncio.Event()

    def put(self, item: EngineOutput | Exception) -> None:
        self._arrived.set()
        if isinstance(item, Exception):
            self._items.append(item)
        elif len(self._items) < MAX_SINGLE_OUTPUTS:
            self._joined.pop(item.request_id, None)  # what comes later belongs behind this one
            self._items.append(item)
        elif (joined := self._joined.get(item.request_id)) is not None:
            joined.add(item)
        else:
            self._joined[item.request_id] = joined = _Joined(item)
            self._items.append(joined)

    async def get(self) -> EngineOutput | Exception:
        """The oldest item; waits until there is one."""
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items.popleft()
        if not isinstance(item, _Joined):
            return item
        output = item.output()
        if self._joined.get(output.request_id) is item:
            del self._joined[output.request_id]
        return output
