"""A checkpoint's chat template: what a conversation is to the model, and what the model's replies look like.

Templates run in transformers' jinja sandbox. What a request asks of a template that the template knows nothing of is
refused: it would change nothing.
"""

import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from mambalign.engine.config import ConfigError
from mambalign.engine.server.assistant_text import (
    REASONING_TAGS,
    TOOL_PARSERS,
    find_tool_parser,
    has_reasoning,
)
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.reasoning import CLOSE, OPEN, ReasoningStart
from mambalign.engine.server.tool_parser import ToolParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TemplateOptions:
    """The fields of a request that shape the rendering, as they were given."""

    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None  # None: unless the final message is continued
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    kwargs: dict[str, Any] | None = None  # chat_template_kwargs


@dataclass(frozen=True)
class RenderedChat:
    token_ids: list[int]
    reasoning_start: ReasoningStart | None  # where the reply begins; None: this model's replies have no such part


class ChatTemplate:
    """`text` replaces the checkpoint's own template. Raises ConfigError for one that jinja cannot read.

    `tool_parser`: a name of `TOOL_PARSERS`, "none", or "auto" (by the template). `reasoning_parser`: "think", "none" or
    "auto".
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        text: str | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ):
        self._tokenizer = tokenizer
        own = text or tokenizer.chat_template or ""
        self._texts: dict[str, str] = own if isinstance(own, dict) else {"default": own}
        every_text = "\n".join(self._texts.values())
        name = find_tool_parser(every_text) if tool_parser == "auto" else tool_parser
        self.tool_parser: type[ToolParser] | None = TOOL_PARSERS.get(name or "none")
        self.reasons = has_reasoning(every_text) if reasoning_parser == "auto" else reasoning_parser == "think"
        added = {str(t): int(i) for i, t in tokenizer.added_tokens_decoder.items()}
        tags = self.tool_parser.tags if self.tool_parser else ()
        self.tag_token_ids = {tag: added[tag] for tag in tags if tag in added}
        self._special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        reserved = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {"messages", "strftime_now", "raise_exception", *reserved} - {"kwargs"}
        for each in self._texts.values():
            try:
                tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=each, tokenize=False)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(f"the chat template cannot be read: line {error.lineno}: {error}") from error
            except Exception:
                pass  # it refuses this conversation, in its own words

    def __bool__(self) -> bool:
        return any(self._texts.values())

    def shows_as_text(self, *, tools: bool) -> bool:
        """Whether every tag of a reply comes as text; else special tokens must not be left out of it."""
        tags = (
            *(REASONING_TAGS if self.reasons else ()),
            *(self.tool_parser.tags if tools and self.tool_parser else ()),
        )
        return self._special.isdisjoint(tags)

    def render(self, messages: list[dict[str, Any]], options: TemplateOptions) -> RenderedChat:
        """Token ids of a conversation. Raises ApiError 400."""
        if not messages:
            raise ApiError(400, "messages must hold at least one message", param="messages")
        text = self._texts.get("tool_use" if options.tools and "tool_use" in self._texts else "default", "")
        kwargs = self._kwargs(text, options)
        continues = bool(options.continue_final_message)
        adds = not continues if options.add_generation_prompt is None else options.add_generation_prompt
        if continues and adds:
            message = "continue_final_message and add_generation_prompt ask for opposite things: give one"
            raise ApiError(400, message, param="continue_final_message")
        if continues and messages[-1]["role"] != "assistant":
            message = "continue_final_message needs a final message of the assistant"
            raise ApiError(400, message, param="continue_final_message")
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages,
                tools=options.tools,
                chat_template=text,
                tokenize=False,
                add_generation_prompt=adds,
                continue_final_message=continues,
                **kwargs,
            )
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        except Exception as error:  # templates are programs: they refuse in their own words
            raise ApiError(400, f"messages: the chat template refused them: {error}", param="messages") from error
        start = self._reasoning_start(prompt, messages[-1]["content"] if continues else None)
        return RenderedChat(token_ids, start if self.reasons else None)

    def _kwargs(self, text: str, options: TemplateOptions) -> dict[str, Any]:
        if options.tools and not mentions(text, "tools"):
            message = "tools are not supported: this model's chat template takes none; leave them out"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        kwargs = dict(options.kwargs or {})
        for name in kwargs:
            path = f"chat_template_kwargs.{name}"
            if name in self._reserved:
                raise ApiError(400, f"{path} is set by the server: leave it out", param=path)
            if not mentions(text, name):
                raise ApiError(400, f"{path} is not used by this model's chat template: leave it out", param=path)
        effort = options.reasoning_effort
        if effort is not None and mentions(text, "reasoning_effort"):
            kwargs.setdefault("reasoning_effort", effort)
        elif effort == "none" and mentions(text, "enable_thinking"):
            kwargs.setdefault("enable_thinking", False)
        elif effort is not None and (effort != "none" or self.reasons):
            message = "reasoning_effort is not used by this model's chat template: leave it out"
            raise ApiError(400, message, param="reasoning_effort", code="unsupported_parameter")
        return kwargs

    def _reasoning_start(self, prompt: str, continued: str | None) -> ReasoningStart:
        """Inside, when the prompt leaves the tag open; behind, when it closed it for the model."""
        tail = (prompt if continued is None else continued).rstrip()
        if continued is not None:
            if tail.rfind(OPEN) > tail.rfind(CLOSE):
                return "inside"
            return "behind" if tail else "before"
        return "inside" if tail.endswith(OPEN) else "behind" if tail.endswith(CLOSE) else "before"


def mentions(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None
