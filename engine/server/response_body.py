"""The body of /v1/responses: text in, nothing stored."""

from typing import Any, Literal

import msgspec

from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.openai_fields import RESPONSE
from mambalign.engine.server.protocol import SamplingBody

INCLUDE_LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16  # pairs
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512  # characters


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of text; `annotations` and `logprobs` come with the answers that clients send back."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message; `id` and `status` come with the answers that clients send back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: None = None  # no template tells phases apart


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseBody(SamplingBody, forbid_unknown_fields=True, kw_only=True):
    openai_fields = RESPONSE

    input: str | list[InputItem]
    instructions: str | None = None  # a system message before the input
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None  # returned as it is
    include: list[str] | None = None
    text: TextConfig | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: int | None = None
    prompt_cache_key: str | None = None  # a hint that changes nothing: all requests share one cache
    safety_identifier: str | None = None  # says who asks, like `user`

    @property
    def wants_logprobs(self) -> bool:
        return INCLUDE_LOGPROBS in (self.include or [])

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

    def messages(self) -> list[dict[str, str]]:
        """The conversation as chat templates take it. Raises ApiError 400."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not self.input:
            raise refused("input", "must hold at least one message")
        for index, item in enumerate(self.input):
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": text_of(item.content, f"input[{index}]")})
        return messages


def text_of(content: str | list[ContentPart], path: str) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.annotations:
            name = f"{path}.content[{index}].annotations"
            raise refused(name, "is not supported by this server: leave it out or empty")
    return "".join(part.text for part in content)


def refused(name: str, reason: str) -> ApiError:
    return ApiError(400, f"{name}: {reason}", param=name)
