"""Which grammar a chat's reply must follow: that of `response_format`, `structured_outputs`, or of its tool calls."""

from typing import Any, Literal

import msgspec

from mambalign.engine.server.chat_template import ChatTemplate, RenderedChat
from mambalign.engine.server.chat_tools import NamedTool, Tool, ToolChoice
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.tool_grammar import tool_grammar
from mambalign.worker.sampling_params import StructuredOutputs


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    pass


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None  # for people
    schema: dict[str, Any] | None = None  # none: any object
    strict: bool | None = None  # the schema is followed all the same


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredFields(msgspec.Struct, forbid_unknown_fields=True):
    """`structured_outputs` of a body: what a text must be; one of these."""

    json: dict[str, Any] | bool | str | None = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def wanted(self) -> StructuredOutputs:
        return StructuredOutputs(**{name: getattr(self, name) for name in self.__struct_fields__})


def of_response_format(wanted: ResponseFormat | None) -> StructuredOutputs | None:
    match wanted:
        case JsonObjectFormat():
            return StructuredOutputs(json_object=True, field="response_format")
        case JsonSchemaFormat(json_schema):
            schema = json_schema.schema if json_schema.schema is not None else {"type": "object"}
            return StructuredOutputs(json=schema, field="response_format.json_schema.schema")
    return None


def of_tools(
    template: ChatTemplate, tools: list[Tool], choice: ToolChoice | None, parallel: bool, *, is_whole_reply: bool
) -> StructuredOutputs | None:
    """Where a call must come, or calls that come must fit. `is_whole_reply`: they come without other text."""
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        parallel = False
    must_call = is_whole_reply or choice == "required" or isinstance(choice, NamedTool)
    if not tools or not (must_call or not parallel or any(tool.function.strict for tool in tools)):
        return None
    lark = tool_grammar(
        template.tool_parser, tools, must_call=must_call, parallel=parallel, token_ids=template.tag_token_ids
    )
    return StructuredOutputs(grammar=lark, field="tools")


def structured_outputs(
    template: ChatTemplate,
    chat: RenderedChat,
    *,
    format: StructuredOutputs | None,
    fields: StructuredFields | None,
    tools: list[Tool],
    tool_choice: ToolChoice | None,
    parallel: bool,
) -> StructuredOutputs | None:
    """The grammar of a chat, behind the reasoning if the reply may begin with one.

    `format`: what the endpoint's own field for it says; `fields`: `structured_outputs`, which all endpoints have.
    With a format and tools that may be called, the reply is either. Raises ApiError 400 for what contradicts itself.
    """
    formats = [format, fields.wanted() if fields is not None else None]
    if None not in formats:
        name = format.field.partition(".")[0]
        message = f"{name} and structured_outputs each say what the whole reply must be: give one"
        raise ApiError(400, message, param=name)
    wanted = formats[0] or formats[1]
    calls = of_tools(template, tools, tool_choice, parallel, is_whole_reply=wanted is not None)
    if wanted is not None and calls is not None:
        if tool_choice not in (None, "auto"):
            name = wanted.field.partition(".")[0]
            message = f"{name} cannot be followed by a reply that must be a tool call: leave it out, or tool_choice"
            raise ApiError(400, message, param=name)
        wanted = msgspec.structs.replace(wanted, calls=calls.grammar)
    wanted = wanted or calls
    start = chat.reasoning_start
    if wanted is None or start in (None, "behind"):
        return wanted
    return msgspec.structs.replace(wanted, reasoning=start)
