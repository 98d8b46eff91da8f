"""The output items of a response, as its text comes: reasoning, messages, function calls, in the order of the text."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from mambalign.engine.server.assistant_delta import AssistantDelta
from mambalign.engine.server.assistant_text import AssistantText

Event = dict[str, Any]  # without its number; `type` says which


class OutputItem:
    """One item that is being written. A subclass says how it looks and which events tell of it."""

    prefix: str  # of its id

    def __init__(self, index: int):
        self.index = index
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.text = ""  # a call's arguments
        self.status = "in_progress"

    def whole(self) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self) -> list[Event]:
        raise NotImplementedError

    def add(self, text: str) -> list[Event]:
        raise NotImplementedError

    def end(self, status: str) -> list[Event]:
        raise NotImplementedError

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}

    def _item_event(self, kind: str) -> Event:
        return {"type": f"response.output_item.{kind}", "output_index": self.index, "item": self.whole()}


class PartItem(OutputItem):
    """An item with one part, a text."""

    part_type: str
    text_events: str  # their type, without "delta" and "done"

    def _part(self) -> dict[str, Any]:
        return {"type": self.part_type, "text": self.text}

    def _content(self) -> list[dict[str, Any]]:
        return [] if self.status == "in_progress" else [self._part()]

    def _of_delta(self) -> dict[str, Any]:
        """Further fields of the events that bring the text."""
        return {}

    def begin(self) -> list[Event]:
        return [self._item_event("added"), self._event("content_part.added", content_index=0, part=self._part())]

    def add(self, text: str) -> list[Event]:
        self.text += text
        return [self._event(f"{self.text_events}.delta", content_index=0, delta=text, **self._of_delta())]

    def end(self, status: str) -> list[Event]:
        self.status = status
        return [
            self._event(f"{self.text_events}.done", content_index=0, text=self.text, **self._of_delta()),
            self._event("content_part.done", content_index=0, part=self._part()),
            self._item_event("done"),
        ]


class ReasoningItem(PartItem):
    prefix, part_type, text_events = "rs", "reasoning_text", "reasoning_text"

    def whole(self) -> dict[str, Any]:
        return {"id": self.id, "type": "reasoning", "summary": [], "status": self.status, "content": self._content()}


class MessageItem(PartItem):
    prefix, part_type, text_events = "msg", "output_text", "output_text"

    def __init__(self, index: int):
        super().__init__(index)
        self.logprobs: list[Any] = []

    def _part(self) -> dict[str, Any]:
        return super()._part() | {"annotations": [], "logprobs": self.logprobs}

    def _of_delta(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs if self.status != "in_progress" else []}

    def add_with_logprobs(self, text: str, logprobs: list[Any]) -> list[Event]:
        self.logprobs = self.logprobs + logprobs
        (event,) = self.add(text)
        return [event | {"logprobs": logprobs}]

    def whole(self) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant"}
        return message | {"status": self.status, "content": self._content()}


class CallItem(OutputItem):
    prefix = "fc"

    def __init__(self, index: int, name: str):
        super().__init__(index)
        self.name = name
        self.call_id = f"call_{uuid.uuid4().hex[:24]}"

    def whole(self) -> dict[str, Any]:
        call = {"id": self.id, "type": "function_call", "call_id": self.call_id, "name": self.name}
        return call | {"arguments": self.text, "status": self.status}

    def begin(self) -> list[Event]:
        return [self._item_event("added")]

    def add(self, text: str) -> list[Event]:
        self.text += text
        return [self._event("function_call_arguments.delta", delta=text)]

    def end(self, status: str) -> list[Event]:
        self.status = status
        arguments = self._event("function_call_arguments.done", name=self.name, arguments=self.text)
        return [arguments, self._item_event("done")]


class OutputItems:
    """Every item so far; the last one is open until `finish`. What is read becomes events."""

    def __init__(self, reader: AssistantText):
        self.items: list[OutputItem] = []
        self._reader = reader

    def read(self, text: str, logprobs: list[Any]) -> list[Event]:
        """`logprobs`: of the tokens that brought the text; only where all of a reply is one message."""
        if logprobs:
            return self._open(MessageItem) + self.items[-1].add_with_logprobs(text, logprobs)
        return [event for delta in self._reader.deltas(text) for event in self._add(delta)]

    def finish(self, status: str) -> list[Event]:
        """The text has ended: the last item has `status`, and a reply without any is an empty message."""
        events = self._add(self._reader.finish())
        if not self.items:
            events += self._open(MessageItem)
        return events + self.items[-1].end(status)

    def whole(self) -> list[dict[str, Any]]:
        return [item.whole() for item in self.items]

    def _add(self, delta: AssistantDelta) -> list[Event]:
        events = list(self._add_text(ReasoningItem, delta.reasoning)) + list(self._add_text(MessageItem, delta.content))
        for call in delta.calls:
            if call.name is not None:
                events += self._begin(lambda index, name=call.name: CallItem(index, name))
            if call.arguments:
                events += self.items[-1].add(call.arguments)
        return events

    def _add_text(self, kind: type[PartItem], text: str) -> Iterator[Event]:
        if text:
            yield from self._open(kind)
            yield from self.items[-1].add(text)

    def _open(self, kind: type[PartItem]) -> list[Event]:
        """The open item is one of this kind."""
        return [] if self.items and isinstance(self.items[-1], kind) else self._begin(kind)

    def _begin(self, make: Callable[[int], OutputItem]) -> list[Event]:
        events = self.items[-1].end("completed") if self.items else []
        self.items.append(make(len(self.items)))
        return events + self.items[-1].begin()


def join_deltas(events: list[Event]) -> list[Event]:
    """One event in place of neighbours that each bring a piece of the same text."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else {}
        if "delta" in event and all(event.get(k) == last.get(k) for k in ("type", "item_id")):
            joined[-1] = last | {"delta": last["delta"] + event["delta"]}
        else:
            joined.append(event)
    return joined
