"""The assistant's message out of the model's text: which readers a checkpoint needs, and how they are chained."""

from collections.abc import Iterator
from typing import Any

from mambalign.engine.server.assistant_delta import AssistantDelta
from mambalign.engine.server.reasoning import CLOSE, OPEN, ReasoningReader, ReasoningStart
from mambalign.engine.server.tool_parser import ToolParser
from mambalign.engine.server.tool_parser_json import HermesToolParser, NemotronToolParser
from mambalign.engine.server.tool_parser_xml import XmlToolParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
    "qwen3_coder": XmlToolParser,
    "nemotron_json": NemotronToolParser,
}
REASONING_TAGS = (OPEN, CLOSE)


def find_tool_parser(template: str) -> str | None:
    """Which of `TOOL_PARSERS` reads the calls that a chat template teaches the model to write; None: none of them."""
    for mark, name in (("<TOOLCALL>", "nemotron_json"), ("<function=", "qwen3_coder"), ("<tool_call>", "hermes")):
        if mark in template:
            return name
    return None


def has_reasoning(template: str) -> bool:
    """Whether a chat template knows think tags."""
    return CLOSE in template


class AssistantText:
    """Reads one choice's text as it comes; `read` and `finish` say what became of it.

    However the text is cut, the joined deltas are the same. `tool_parser` and `reasoning_start` None: no such part.
    """

    def __init__(
        self,
        tool_parser: type[ToolParser] | None,
        parameters: dict[str, dict[str, Any]],
        reasoning_start: ReasoningStart | None,
    ):
        self._delta = AssistantDelta()
        self._tools = tool_parser(parameters) if tool_parser else None
        self._reasoning = None
        if reasoning_start is not None:
            self._reasoning = ReasoningReader(reasoning_start, self._add_reasoning, self._add_content)

    @property
    def num_calls(self) -> int:
        return self._tools.num_calls if self._tools else 0

    @property
    def is_plain(self) -> bool:
        """All of the text is content."""
        return self._reasoning is None and self._tools is None

    def deltas(self, text: str) -> Iterator[AssistantDelta]:
        """What `read` says of the text, in the text's order: a piece for each character that says something."""
        pieces = [text] if self.is_plain else text
        return (delta for delta in map(self.read, pieces) if not delta.is_empty)

    def read(self, text: str) -> AssistantDelta:
        if self.is_plain:
            return AssistantDelta(content=text)
        for char in text:
            if self._reasoning is not None:
                self._reasoning.read(char)
            else:
                self._add_content(char)
        return self._take()

    def finish(self) -> AssistantDelta:
        """The text has ended."""
        if self._reasoning is not None:
            self._reasoning.finish()
        if self._tools is not None:
            self._tools.finish()
        return self._take()

    def _add_reasoning(self, text: str) -> None:
        self._delta.reasoning += text

    def _add_content(self, text: str) -> None:
        if self._tools is None:
            self._delta.content += text
        else:
            for char in text:
                self._tools.read(char)

    def _take(self) -> AssistantDelta:
        taken, self._delta = self._delta, AssistantDelta()
        if self._tools is not None:
            said, self._tools.delta = self._tools.delta, AssistantDelta()
            taken.content, taken.calls = said.content, said.calls
        return taken
