"""Tool calls as JSON objects between tags.

Hermes, Qwen 2.5 and 3, Granite 4, Falcon-H1: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, a pair of
tags a call. Nemotron Nano 2: `<TOOLCALL>[{"name": "f", "arguments": {...}}, ...]</TOOLCALL>`, a list. Either tag takes
one object or a list here. Source: the models' published chat templates.
"""

import json
from collections.abc import Callable

from mambalign.engine.server.tag_finder import TagFinder
from mambalign.engine.server.tool_parser import ToolParser

ARGUMENTS = ("arguments", "parameters")


class HermesToolParser(ToolParser):
    open_tags = ("<tool_call>",)
    close_tag = "</tool_call>"
    tags = (*open_tags, close_tag)

    def _begin(self, tag: str) -> None:
        self._close = TagFinder(self.close_tag)
        self._call: CallReader | None = None
        self._is_broken = False  # behind a call that had begun: skipped up to the close tag

    def _read_block(self, char: str) -> None:
        if self._call is not None:
            self._call.read(char)
            if self._call.is_broken:
                self._break()
            elif self._call.is_done:
                self._call = None
            return
        released, tag = self._close.read(char)
        if tag:
            if self._block is None:
                self._leave()
            else:
                self._give_up()  # nothing between the tags
            return
        for each in released:
            if self._is_broken or each.isspace() or each in "[],":
                continue
            if each == "{":
                self._call = CallReader(self._begin_call, self._add_arguments)
            else:
                self._break()
                return

    def _break(self) -> None:
        self._call = None
        if self._block is None:
            self._is_broken = True
        else:
            self._give_up()


class NemotronToolParser(HermesToolParser):
    open_tags = ("<TOOLCALL>",)
    close_tag = "</TOOLCALL>"
    tags = (*open_tags, close_tag)


class CallReader:
    """One object behind its `{`: says the name, and the arguments as they were written, as soon as it can.

    Arguments that are a JSON text in a string are said decoded; none, or null, is `{}`. Other keys are skipped.
    """

    def __init__(self, begin: Callable[[str], None], add_arguments: Callable[[str], None]):
        self.is_done = self.is_broken = False
        self._say_name, self._say_arguments = begin, add_arguments
        self._has_name = self._has_arguments = False
        self._waiting = ""  # arguments read before the name
        self._key = ""
        self._value: ValueReader | None = None
        self._expects = "key"  # "key", "colon", "value", "end"

    def read(self, char: str) -> None:
        if self._value is not None:
            self._read_value(char)
        elif char.isspace():
            pass
        elif self._expects == "colon":
            self._expects = "value"
            self.is_broken = char != ":"
        elif self._expects == "value" or (self._expects == "key" and char == '"'):
            self._value = ValueReader()
            self._read_value(char)
        elif char == "}":
            self._end()
        elif char == "," and self._expects == "end":
            self._expects = "key"
        else:
            self.is_broken = True

    def _read_value(self, char: str) -> None:
        value, is_key = self._value, self._expects == "key"
        is_taken = value.read(char)
        streams = not is_key and self._key in ARGUMENTS and value.text.startswith("{")
        if streams and is_taken:
            self._add(char)
        if not value.is_done:
            return
        self._value = None
        try:
            parsed = None if streams else json.loads(value.text)
        except ValueError:
            self.is_broken = True
            return
        if is_key:
            self._key, self._expects = parsed, "colon"
            return
        self._expects = "end"
        if self._key == "name":
            self._take_name(parsed)
        elif self._key in ARGUMENTS and not streams and parsed is not None:
            self._add(parsed if isinstance(parsed, str) else value.text)
        if not is_taken:
            self.read(char)

    def _take_name(self, name: object) -> None:
        if not isinstance(name, str) or not name or self._has_name:
            self.is_broken = True
            return
        self._has_name = True
        self._say_name(name)
        if self._waiting:
            self._say_arguments(self._waiting)

    def _add(self, text: str) -> None:
        self._has_arguments = True
        if self._has_name:
            self._say_arguments(text)
        else:
            self._waiting += text

    def _end(self) -> None:
        self.is_done, self.is_broken = True, not self._has_name
        if self._has_name and not self._has_arguments:
            self._say_arguments("{}")


class ValueReader:
    """Finds where a JSON value ends. Brackets are counted, not matched: wrong JSON is passed on for what it is."""

    def __init__(self) -> None:
        self.text = ""
        self.is_done = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def read(self, char: str) -> bool:
        """False if `char` is not part of the value any more (a number or a word ends that way)."""
        is_word = bool(self.text) and self.text[0] not in '{["'
        if is_word and (char.isspace() or char in ",}]"):
            self.is_done = True
            return False
        self.text += char
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        self.is_done = not is_word and self.text[0] in '{["' and not self._in_string and self._depth <= 0
        return True
