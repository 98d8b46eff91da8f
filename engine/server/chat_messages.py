"""The messages of a chat body: their types, and the form in which chat templates take them."""

from typing import Any, Literal

import msgspec

from mambalign.engine.server.errors import ApiError


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    id: str
    function: FunctionCall


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="role"):
    """Any message. `name` says which of several people or tools speaks."""

    name: str | None = None

    def for_template(self, path: str) -> dict[str, Any]:
        """As chat templates take it; `path` names the message in errors. Raises ApiError 400."""
        role = self.__struct_config__.tag
        message: dict[str, Any] = {"role": "system" if role == "developer" else role, **self._fields(path)}
        return message if self.name is None else message | {"name": self.name}

    def _fields(self, path: str) -> dict[str, Any]:
        raise NotImplementedError


class TextMessage(Message, kw_only=True):
    content: Content

    def _fields(self, path: str) -> dict[str, Any]:
        return {"content": join_content(self.content)}


class SystemMessage(TextMessage, tag="system"):
    pass


class DeveloperMessage(TextMessage, tag="developer"):  # OpenAI's new word for system
    pass


class UserMessage(TextMessage, tag="user"):
    pass


class ToolMessage(TextMessage, tag="tool", kw_only=True):
    """What a tool answered to the call `tool_call_id`."""

    tool_call_id: str

    def _fields(self, path: str) -> dict[str, Any]:
        return {"content": join_content(self.content), "tool_call_id": self.tool_call_id}


class AssistantMessage(Message, tag="assistant", kw_only=True):
    """An earlier reply. Templates decide whether earlier reasoning is shown to the model again."""

    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under another server's name

    def _fields(self, path: str) -> dict[str, Any]:
        if self.content is None and not self.tool_calls:
            name = f"{path}.content"
            raise ApiError(400, f"{name} is required in a message without tool_calls", param=name)
        if None not in (self.reasoning, self.reasoning_content):
            name = f"{path}.reasoning"
            raise ApiError(400, f"{name} and reasoning_content are one field: give one", param=name)
        fields: dict[str, Any] = {"content": join_content(self.content or "")}
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        if reasoning is not None:
            fields["reasoning_content"] = reasoning
        if self.tool_calls:
            fields["tool_calls"] = [
                call_for_template(call, f"{path}.tool_calls[{i}].function.arguments")
                for i, call in enumerate(self.tool_calls)
            ]
        return fields


AnyMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


def join_content(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def call_for_template(call: ToolCall, name: str) -> dict[str, Any]:
    """Templates write the arguments themselves, in the form the model knows: they want the object, not its JSON.

    `name`: of the arguments, in errors. Raises ApiError 400.
    """
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"{name} is not valid JSON: {error}", param=name) from error
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{name} must be a JSON object", param=name)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def messages_for_template(messages: list[AnyMessage]) -> list[dict[str, Any]]:
    """Raises ApiError 400 for a message that cannot be put into a template."""
    return [message.for_template(f"messages[{i}]") for i, message in enumerate(messages)]


def check_parts(message: dict[str, Any], path: str) -> None:
    """Refuse parts of a raw message that are not text, in words of their own. Raises ApiError 400."""
    content = message.get("content")
    for i, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            name = f"{path}.content[{i}].type"
            raise ApiError(
                400, f"{name}: {kind!r} parts are not supported: this server takes text only", param=name,
                code="unsupported_parameter",
            )  # fmt: skip
