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
    template: ChatTemplate, tools: list[Tool], choice: ToolChoice | None, parallel: bool
) -> StructuredOutputs | None:
    """Where a call must come, or calls that come must fit."""
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        parallel = False
    must_call = choice == "required" or isinstance(choice, NamedTool)
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
    response_format: ResponseFormat | None,
    fields: StructuredFields | None,
    tools: list[Tool],
    tool_choice: ToolChoice | None,
    parallel: bool,
) -> StructuredOutputs | None:
    """The one grammar of a chat, behind the reasoning if the reply may begin with one. Raises ApiError 400 for two."""
    found = [
        of_response_format(response_format),
        fields.wanted() if fields is not None else None,
        of_tools(template, tools, tool_choice, parallel),
    ]
    wanted = [each for each in found if each is not None]
    if wanted and tools and wanted[0].field != "tools":
        name = wanted[0].field.partition(".")[0]
        message = (
            f"{name} cannot be used together with tools that may be called: leave one out, or set tool_choice to none"
        )
        raise ApiError(400, message, param=name)
    if len(wanted) > 1:
        first, second = (each.field.partition(".")[0] for each in wanted[:2])
        message = f"{first} cannot be used together with {second}: each says what the whole reply must be"
        raise ApiError(400, message, param=first)
    if not wanted:
        return None
    start = chat.reasoning_start
    return wanted[0] if start in (None, "behind") else msgspec.structs.replace(wanted[0], reasoning=start)
