"""Tool calls with a tag a parameter: Qwen3-Coder, Qwen3-Next, Qwen 3.5, Nemotron 3.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Tokyo
    </parameter>
    </function>
    </tool_call>

Values are plain text; the function's schema says which become JSON strings and which are JSON already. Source: the
models' published chat templates.
"""

import json
from typing import Any

from mambalign.engine.server.tag_finder import TagFinder
from mambalign.engine.server.tool_parser import ToolParser

FUNCTION, PARAMETER, END_PARAMETER, END_FUNCTION = "<function=", "<parameter=", "</parameter>", "</function>"
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class XmlToolParser(ToolParser):
    """A string is streamed as it is written; any other value is said when it is whole. Unknown parameters are strings.

    The outer pair of tags may be missing, as some of these models leave it out.
    """

    open_tags = ("<tool_call>", FUNCTION)
    close_tag = "</tool_call>"
    tags = ("<tool_call>", close_tag)

    def _begin(self, tag: str) -> None:
        self._has_outer_tags = tag != FUNCTION
        self._text = ""
        if self._has_outer_tags:
            self._go_between()
        else:
            self._read_part = self._read_name

    def _read_block(self, char: str) -> None:
        self._read_part(char)

    def _go_between(self) -> None:
        self._read_part, self._tags, self._text = self._read_between, TagFinder(FUNCTION, self.close_tag), ""

    def _read_between(self, char: str) -> None:
        """Outside of functions, inside of the outer tags."""
        released, tag = self._tags.read(char)
        self._text += released
        if tag == FUNCTION:
            self._read_part, self._text = self._read_name, ""
        elif tag:
            if self._block is None:
                self._leave()
            else:
                self._give_up()
        elif released.strip() and self._block is not None:
            self._give_up()
        elif released.strip() and not self._has_outer_tags:
            self._leave()
            for each in self._text + self._tags.finish():
                self.read(each)

    def _read_name(self, char: str) -> None:
        if char != ">":
            self._text += char
            if char == "<":
                self._give_up()
            return
        name = self._text.strip()
        if not name:
            self._give_up()
            return
        self._begin_call(name)
        self._schema = self._parameters.get(name, {}).get("properties", {})
        self._num_values = 0
        self._go_into_function()

    def _go_into_function(self) -> None:
        self._read_part, self._tags = self._read_function, TagFinder(PARAMETER, END_FUNCTION, self.close_tag)

    def _read_function(self, char: str) -> None:
        _, tag = self._tags.read(char)
        if tag == PARAMETER:
            self._read_part, self._text = self._read_parameter_name, ""
        elif tag:
            self._add_arguments("}" if self._num_values else "{}")
            if tag == self.close_tag:
                self._leave()
            else:
                self._go_between()

    def _read_parameter_name(self, char: str) -> None:
        if char != ">":
            self._text += char
            return
        name = self._text.strip()
        schema = self._schema.get(name, {}) if isinstance(self._schema, dict) else {}
        self._value_schema = schema if isinstance(schema, dict) else {}
        self._streams = is_string_only(self._value_schema)
        self._add_arguments((", " if self._num_values else "{") + json.dumps(name, ensure_ascii=False) + ": ")
        self._num_values += 1
        self._text, self._newline, self._is_first = "", "", True
        if self._streams:
            self._add_arguments('"')
        self._read_part, self._tags = self._read_value, TagFinder(END_PARAMETER)

    def _read_value(self, char: str) -> None:
        """The newline behind the open tag and the one before the close tag are not part of the value."""
        released, tag = self._tags.read(char)
        for each in released:
            is_first, self._is_first = self._is_first, False
            if is_first and each == "\n":
                continue
            if self._newline:
                self._add_value("\n")
            self._newline = each if each == "\n" else ""
            if each != "\n":
                self._add_value(each)
        if tag:
            self._add_arguments('"' if self._streams else as_json(self._text, self._value_schema))
            self._go_into_function()

    def _add_value(self, char: str) -> None:
        if self._streams:
            self._add_arguments(json.dumps(char, ensure_ascii=False)[1:-1])
        else:
            self._text += char


def schema_types(schema: Any) -> set[str]:
    """JSON types that a schema allows, as far as it says so by itself; empty when it does not."""
    if not isinstance(schema, dict):
        return set()
    stated = schema.get("type")
    if stated is not None:
        stated = stated if isinstance(stated, list) else [stated]
        return {t if isinstance(t, str) else "any" for t in stated}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {json_type(value) for value in values}
    options = schema.get("anyOf") or schema.get("oneOf")
    options = options if isinstance(options, list) else []
    return set().union(*(schema_types(option) or {"any"} for option in options))


def json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object")


def is_string_only(schema: dict[str, Any]) -> bool:
    return "$ref" not in schema and schema_types(schema) in (set(), {"string"})


def as_json(text: str, schema: dict[str, Any]) -> str:
    """The JSON that a value's text stands for: itself if it is JSON of a type the schema allows, else a string."""
    word = PYTHON_WORDS.get(text.strip(), text.strip())
    types = schema_types(schema)
    try:
        value = json.loads(word, parse_constant=lambda name: float("no number"))
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    found = json_type(value)
    allowed = types | ({"integer"} if "number" in types else set())
    if isinstance(value, float) and value.is_integer():
        allowed |= {"number"} if "integer" in types else set()
    if types and "any" not in types and found not in allowed:
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)
