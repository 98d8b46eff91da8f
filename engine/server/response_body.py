"""The body of /v1/responses: a conversation in items, nothing stored."""

from typing import Any, Literal

import msgspec

from mambalign.engine.server.chat_template import TemplateOptions
from mambalign.engine.server.chat_tools import Function, FunctionName, NamedTool, Tool, ToolChoice
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.openai_fields import RESPONSE
from mambalign.engine.server.protocol import ReasoningEffort, SamplingBody
from mambalign.engine.server.response_input import InputItem, messages_of_items, name_types
from mambalign.engine.server.structured import JsonObjectFormat, TextFormat
from mambalign.worker.sampling_params import StructuredOutputs

INCLUDE_LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16  # pairs
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512  # characters


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="json_schema"):
    """A chat's `response_format`, in the flat form of this endpoint."""

    name: str
    schema: dict[str, Any]
    description: str | None = None  # for people
    strict: bool | None = None  # the schema is followed all the same


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="function"):
    """A chat's tool, in the flat form of this endpoint."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of an object; none: no parameters
    strict: bool | None = None  # the arguments must fit the schema (default: yes, other than in a chat)

    def for_chat(self) -> Tool:
        return Tool(Function(self.name, self.description, self.parameters, self.strict is not False))


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: str


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: ReasoningEffort | None = None
    summary: None = None  # reasoning is given as it is
    generate_summary: None = None


class ResponseBody(SamplingBody, forbid_unknown_fields=True, kw_only=True):
    openai_fields = RESPONSE

    input: str | list[InputItem]
    instructions: str | None = None  # a system message before the input
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None  # returned as it is
    include: list[str] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None  # default: auto
    parallel_tool_calls: bool | None = None  # default: true
    truncation: Literal["disabled"] | None = None
    top_logprobs: int | None = None
    prompt_cache_key: str | None = None  # a hint that changes nothing: all requests share one cache
    safety_identifier: str | None = None  # says who asks, like `user`

    @classmethod
    def prepare(cls, raw: dict[str, Any]) -> None:
        name_types(raw.get("input"))

    @property
    def wants_logprobs(self) -> bool:
        return INCLUDE_LOGPROBS in (self.include or [])

    @property
    def chat_tools(self) -> list[Tool]:
        return [tool.for_chat() for tool in self.tools or []]

    @property
    def chat_tool_choice(self) -> ToolChoice | None:
        choice = self.tool_choice
        return NamedTool(FunctionName(choice.name)) if isinstance(choice, NamedFunction) else choice

    @property
    def format(self) -> StructuredOutputs | None:
        """What `text.format` says that the text must be."""
        match self.text and self.text.format:
            case JsonObjectFormat():
                return StructuredOutputs(json_object=True, field="text.format")
            case JsonSchemaFormat(schema=schema):
                return StructuredOutputs(json=schema, field="text.format.schema")
        return None

    def check(self) -> None:
        """Raise ApiError 400 for what the fields' types alone do not refuse."""
        for name in self.include or []:
            if name != INCLUDE_LOGPROBS:
                raise refused("include", f"{name!r} is not supported by this server: only {INCLUDE_LOGPROBS!r} is")
        if self.top_logprobs and not self.wants_logprobs:
            raise refused("top_logprobs", f"needs {INCLUDE_LOGPROBS!r} in include")
        if self.stream_options is not None and self.stream_options.include_usage is not None:
            raise refused("stream_options", "include_usage is no option here: the last event has the usage")
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA:
            raise refused("metadata", f"must hold at most {MAX_METADATA} pairs, got {len(metadata)}")
        for key, value in metadata.items():
            if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
                raise refused(
                    "metadata", f"keys have at most {MAX_METADATA_KEY} characters, values {MAX_METADATA_VALUE}"
                )

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates take it. Raises ApiError 400."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not self.input:
            raise refused("input", "must hold at least one item")
        return [*messages, *messages_of_items(self.input)]

    def template_options(self, tools: list[Tool]) -> TemplateOptions:
        """`tools`: those that the model is told of."""
        effort = self.reasoning and self.reasoning.effort
        return TemplateOptions([tool.for_template() for tool in tools] or None, reasoning_effort=effort)


def refused(name: str, reason: str) -> ApiError:
    return ApiError(400, f"{name}: {reason}", param=name)
