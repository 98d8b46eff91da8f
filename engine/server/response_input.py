"""The input items of /v1/responses: their types, and the conversation that they are to a chat template."""

from typing import Any, Literal

import msgspec

from mambalign.engine.server.chat_messages import FunctionCall, ToolCall, call_for_template
from mambalign.engine.server.errors import ApiError


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of text; `annotations` and `logprobs` come with the answers that clients send back."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ReasoningPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["reasoning_text"]
    text: str


class SummaryPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["summary_text"]
    text: str


class Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """Any item; `id` and `status` come with the answers that clients send back."""

    id: str | None = None
    status: str | None = None


class MessageItem(Item, tag="message", kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    phase: None = None  # no template tells phases apart


class FunctionCallItem(Item, tag="function_call", kw_only=True):
    """A call of the model's, sent back."""

    call_id: str
    name: str
    arguments: str  # JSON
    namespace: None = None
    caller: None = None
    is_async: Literal[False] | None = msgspec.field(default=None, name="async")


class FunctionCallOutputItem(Item, tag="function_call_output", kw_only=True):
    """What the tool answered to the call `call_id`, which comes before it."""

    call_id: str
    output: str | list[TextPart]
    name: str | None = None
    namespace: None = None
    caller: None = None


class ReasoningItem(Item, tag="reasoning", kw_only=True):
    """Reasoning of an earlier reply, sent back. The template decides whether the model sees it again."""

    summary: list[SummaryPart] = []
    content: list[ReasoningPart] | None = None
    encrypted_content: None = None  # nothing here is encrypted

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


def name_types(raw: Any) -> None:
    """Say of raw items which they are: a message may come without its type. Clients send fields of an answer back that
    are null, in their own names for them: those are taken out."""
    for item in raw if isinstance(raw, list) else []:
        if isinstance(item, dict):
            for name in [name for name, value in item.items() if value is None]:
                del item[name]
            item.setdefault("type", "message")


def messages_of_items(items: list[InputItem]) -> list[dict[str, Any]]:
    """The messages for the template; what one reply said (reasoning, text, calls) is one. Raises ApiError 400."""
    messages: list[dict[str, Any]] = []
    call_ids: set[str] = set()
    reply: dict[str, Any] | None = None  # the last message, while more of the assistant's reply may belong to it
    for i, item in enumerate(items):
        path = f"input[{i}]"
        if isinstance(item, FunctionCallOutputItem):
            if item.call_id not in call_ids:
                name = f"{path}.call_id"
                raise ApiError(400, f"{name}: no function_call before it has the id {item.call_id!r}", param=name)
            content = text_of(item.output, f"{path}.output")
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
            reply = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": text_of(item.content, f"{path}.content")})
            reply = None
        else:
            if reply is None or begins_reply(item, reply):
                reply = {"role": "assistant", "content": ""}
                messages.append(reply)
            match item:
                case ReasoningItem():
                    reply["reasoning_content"] = item.text
                case MessageItem():
                    reply["content"] = text_of(item.content, f"{path}.content")
                case FunctionCallItem():
                    call_ids.add(item.call_id)
                    call = ToolCall(item.call_id, FunctionCall(item.name, item.arguments))
                    reply.setdefault("tool_calls", []).append(call_for_template(call, f"{path}.arguments"))
    return messages


def begins_reply(item: InputItem, reply: dict[str, Any]) -> bool:
    """Whether an item of the assistant's cannot be the next part of `reply`: its parts come in a fixed order."""
    if isinstance(item, FunctionCallItem):
        return False
    has_said = bool(reply["content"]) or "tool_calls" in reply
    return has_said or (isinstance(item, ReasoningItem) and "reasoning_content" in reply)


def text_of(content: str | list[TextPart], path: str) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.annotations:
            name = f"{path}[{index}].annotations"
            raise ApiError(400, f"{name}: is not supported by this server: leave it out or empty", param=name)
    return "".join(part.text for part in content)
