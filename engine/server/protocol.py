"""The bodies of requests: their fields and types, and how a body becomes one of them.

A field that is not here is refused, and so is one of OpenAI's that this server does not support; null stands for
"not given" everywhere.
"""

import re
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from mambalign.engine.server.allowed_values import allowed_values
from mambalign.engine.server.chat_messages import AnyMessage, check_parts
from mambalign.engine.server.chat_template import TemplateOptions
from mambalign.engine.server.chat_tools import Tool, ToolChoice
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.openai_fields import CHAT, COMPLETION, MESSAGE, FieldTable
from mambalign.engine.server.structured import ResponseFormat, StructuredFields
from mambalign.worker.sampling_params import SamplingParams

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Any body. The fields that choose tokens are `SamplingParams`'s, and checked there."""

    openai_fields: ClassVar[FieldTable] = {}  # what the endpoint does with each of OpenAI's fields

    model: str | None = None

    @classmethod
    def prepare(cls, raw: dict[str, Any]) -> None:
        """Make of the raw body, in place, what the types take. Raises ApiError 400 for what they cannot name."""


class SamplingBody(Body, forbid_unknown_fields=True, kw_only=True):
    """What the three endpoints that generate have in common."""

    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None  # of the text (default: yes); not where tags of a chat are such tokens
    structured_outputs: StructuredFields | None = None
    stream: bool | None = None
    stream_options: "StreamOptions | None" = None
    cache_salt: str | None = None  # prefixes are shared between requests of one salt only
    user: str | None = None  # says who asks; changes nothing

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """What was given, the rest at its default; `changes` come last."""
        given = {name: getattr(self, name, None) for name in SamplingParams.__struct_fields__}
        if self.structured_outputs is not None:
            given["structured_outputs"] = self.structured_outputs.wanted()
        given |= changes
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class GenerationBody(SamplingBody, forbid_unknown_fields=True, kw_only=True):
    max_tokens: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None  # alternatives for each token of the prompt
    return_token_ids: bool | None = None  # adds token_ids to each choice, and prompt_token_ids (streamed: once)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CompletionBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    openai_fields = COMPLETION

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None  # alternatives a token
    best_of: int | None = None  # texts generated, of which the n likeliest are returned
    echo: bool | None = None  # the prompt is part of the text; max_tokens may then be 0


class ChatBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    openai_fields = CHAT

    messages: list[AnyMessage]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None  # end with the head of the assistant's reply (default: yes)
    continue_final_message: bool | None = None  # the reply goes on where the final message ends
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # handed to the checkpoint's template
    max_completion_tokens: int | None = None  # OpenAI's new word for max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = None  # default: auto
    parallel_tool_calls: bool | None = None  # default: true
    response_format: ResponseFormat | None = None
    prompt_cache_key: str | None = None  # a hint that changes nothing: all requests share one cache
    safety_identifier: str | None = None  # says who asks, like `user`

    @classmethod
    def prepare(cls, raw: dict[str, Any]) -> None:
        prepare_messages(raw.get("messages"))


class TokenizeBody(Body, forbid_unknown_fields=True, kw_only=True):
    prompt: str | None = None
    messages: list[AnyMessage] | None = None  # a chat's; the next five go with them
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def prepare(cls, raw: dict[str, Any]) -> None:
        prepare_messages(raw.get("messages"))


def template_options(body: ChatBody | TokenizeBody, tools: list[Tool]) -> TemplateOptions:
    """`tools`: those that the model is told of."""
    return TemplateOptions(
        [tool.for_template() for tool in tools] or None,
        body.add_generation_prompt,
        body.continue_final_message,
        body.reasoning_effort,
        body.chat_template_kwargs,
    )


class DetokenizeBody(Body, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(data: bytes, kind: type[AnyBody]) -> AnyBody:
    """Decode a JSON body. Raises ApiError 400 that names the field."""
    try:
        raw = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ApiError(400, "the body must be a JSON object")
    drop_neutral(raw, kind.openai_fields, "")
    kind.prepare(raw)
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), kind, raw) from error


def prepare_messages(raw: Any) -> None:
    """Messages without the parts of an answer that clients send back empty. Raises ApiError 400."""
    for index, message in enumerate(raw if isinstance(raw, list) else []):
        if isinstance(message, dict):
            drop_neutral(message, MESSAGE, f"messages[{index}].")
            check_parts(message, f"messages[{index}]")
            for name in [name for name, value in message.items() if value is None and name != "content"]:
                del message[name]


def drop_neutral(raw: dict[str, Any], table: FieldTable, path: str) -> None:
    """Take refused fields that ask for nothing out of `raw`; raise ApiError for one that asks."""
    for name in table.keys() & raw.keys():
        refused = table[name]
        if refused is None:
            continue
        value = raw.pop(name)
        if value is not None and not any(value == v and type(value) is type(v) for v in refused.neutral):
            raise ApiError(
                400,
                f"{path}{name} is not supported by this server: {refused.instead}",
                param=path + name,
                code="unsupported_parameter",
            )


def validation_error(text: str, kind: type[Body], raw: dict[str, Any]) -> ApiError:
    """msgspec's text, with the field's name first: "Expected `int`, got `str` - at `$.max_tokens`"."""
    is_of_key = " - at `key` in `$" in text
    reason, _, path = text.replace(" - at `key` in `$", " - at `$").partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if match := re.match(r"Object (contains unknown|missing required) field `(.*)`", reason, re.DOTALL):
        name = f"{path}.{match[2]}" if path else match[2]
        what = "is not a field of this request" if match[1] == "contains unknown" else "is required"
        code = "unknown_parameter" if match[1] == "contains unknown" else "missing_required_parameter"
        return ApiError(400, f"{name} {what}", param=name, code=code)
    if match := re.match(r"Invalid (?:enum )?value (.*)", reason, re.DOTALL):
        if allowed := allowed_values(kind, raw, path):
            words = f"one of {', '.join(allowed)}" if len(allowed) > 1 else allowed[0]
            return ApiError(400, f"{path} must be {words}, got {match[1]}", param=path)
    whose = "a key: " if is_of_key else "a value: " if path.endswith("[...]") else ""  # of a dict
    path = path.replace("[...]", "")
    return ApiError(400, f"{path}: {whose}{reason[:1].lower()}{reason[1:]}", param=path or None)


def split_prompt(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Each of OpenAI's four forms of a prompt as a list of texts or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) != 1:
        wanted = "a text, a list of token ids, a list of texts, or a list of lists of token ids"
        raise ApiError(400, f"prompt must be {wanted}; it must not be empty", param="prompt")
    return list(prompt)
