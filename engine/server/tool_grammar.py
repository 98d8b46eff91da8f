"""What a reply with tool calls may look like, as a Lark grammar of llguidance's: one rule a function.

Made where a call must come (`tool_choice` "required" or a name), and where calls that may come must fit (`strict`
functions, `parallel_tool_calls` false). In the form that the checkpoint's template teaches, so the parser reads it.
"""

import json
from collections.abc import Callable
from typing import Any

from mambalign.engine.server.chat_tools import Tool
from mambalign.engine.server.tool_parser import ToolParser
from mambalign.engine.server.tool_parser_json import NemotronToolParser
from mambalign.engine.server.tool_parser_xml import XmlToolParser, is_string_only

JSON_OPTIONS = {"whitespace_pattern": r"\x20?"}
TEXT = r"TEXT: /(.|\n)*/"
WriteTag = Callable[[str], str]  # a tag in Lark's writing: a token by its id, or a quoted text


def tool_grammar(
    parser: type[ToolParser], tools: list[Tool], *, must_call: bool, parallel: bool, token_ids: dict[str, int]
) -> str:
    """`token_ids`: of tags that are one token of the vocabulary."""

    def tag(text: str) -> str:
        return f"<[{token_ids[text]}]>" if text in token_ids else quote(text)

    opened, closed = parser.tags
    make = xml_rules if issubclass(parser, XmlToolParser) else json_rules
    rules = [TEXT, *make(tools)]
    one = " | ".join(f"call_{i}" for i in range(len(tools)))
    if issubclass(parser, NemotronToolParser):
        more = f' (", " ({one}))*' if parallel else ""
        rest = f'"[" ({one}){more} "]" {tag(closed)}'
        more_blocks = ""  # one holds all calls
    else:
        rest = f'"\\n" ({one}) "\\n" {tag(closed)}'
        more_blocks = f' ("\\n" {tag(opened)} rest)*' if parallel else ""
    if must_call:
        rules += [f"rest: {rest}", f"start: {tag(opened)} rest{more_blocks}"]
    else:
        # Lazy: the first open tag in the text is one, and nothing but a call can follow.
        is_token = opened in token_ids
        head = f"head: TEXT {tag(opened)}" if is_token else f"head[lazy]: TEXT {tag(opened)}"
        calls = "(head rest)*" if parallel else "(head rest)?"
        rules += [f"rest: {rest}", head, f"start: {calls} tail", "tail: TEXT"]
        if not parallel and not is_token:
            rules[-1] = f"tail: TAIL\nTAIL: {TEXT.partition(': ')[2]} & ~/(.|\\n)*{regex(opened)}(.|\\n)*/"
    return "%llguidance {}\n" + "\n".join(rules) + "\n"


def json_rules(tools: list[Tool]) -> list[str]:
    rules = []
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
        rules.append(f'call_{i}: {quote(head)} {json_schema(tool.schema)} "}}"')
    return rules


def xml_rules(tools: list[Tool]) -> list[str]:
    """Parameters in the schema's order; those not required may be left out. No others."""
    rules = [r"string_value[lazy]: /(.|\n)*\n<\/parameter>\n/"]
    for i, tool in enumerate(tools):
        schema, parts = tool.schema, [quote(f"<function={tool.function.name}>\n")]
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        for j, (name, value) in enumerate(properties.items()):
            rules.append(f"p_{i}_{j}: {quote(f'<parameter={name}>' + chr(10))} {xml_value(value, schema)}")
            parts.append(f"p_{i}_{j}" + ("" if name in required else "?"))
        rules.append(f"call_{i}: {' '.join(parts)} {quote('</function>')}")
    return rules


def xml_value(value: Any, schema: dict[str, Any]) -> str:
    """A value up to the end of its close tag."""
    end = quote("\n</parameter>\n")
    if not isinstance(value, dict):
        return f"{json_schema(value)} {end}"
    choices = [value["const"]] if "const" in value else value.get("enum")
    if is_string_only(value):
        if not choices:
            return "string_value"
        return f"({' | '.join(quote(str(each)) for each in choices)}) {end}"
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return f"{json_schema({**shared, **value})} {end}"


def json_schema(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {"x-guidance": JSON_OPTIONS, **schema}
    return f"%json {json.dumps(schema)}"


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex(text: str) -> str:
    return text.replace("/", "\\/")
