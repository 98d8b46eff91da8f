"""A checkpoint's chat template as the server needs it: prompts out of conversations, and what the replies look like."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mambalign.engine.prompt_template import PromptTemplate, TemplateError, mentions
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
        self._prompts = PromptTemplate(tokenizer, text)
        every_text = self._prompts.every_text
        name = find_tool_parser(every_text) if tool_parser == "auto" else tool_parser
        self.tool_parser: type[ToolParser] | None = TOOL_PARSERS.get(name or "none")
        self.reasons = has_reasoning(every_text) if reasoning_parser == "auto" else reasoning_parser == "think"
        added = {str(t): int(i) for i, t in tokenizer.added_tokens_decoder.items()}
        tags = self.tool_parser.tags if self.tool_parser else ()
        self.tag_token_ids = {tag: added[tag] for tag in tags if tag in added}
        self._special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def shows_as_text(self, *, tools: bool) -> bool:
        """Whether every tag of a reply comes as text; else special tokens must not be left out of it."""
        tags = (
            *(REASONING_TAGS if self.reasons else ()),
            *(self.tool_parser.tags if tools and self.tool_parser else ()),
        )
        return self._special.isdisjoint(tags)

    def render(
        self, messages: list[dict[str, Any]], options: TemplateOptions, check: Callable[[str], None]
    ) -> RenderedChat:
        """Token ids of a conversation. Raises ApiError 400; `check` may refuse the text that they are made of."""
        try:
            prompt = self._prompts.render(
                messages,
                tools=options.tools,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                kwargs=self._kwargs(options),
            )
        except TemplateError as error:
            raise ApiError(400, str(error), param=error.param, code=error.code) from error
        check(prompt)
        continued = messages[-1]["content"] if options.continue_final_message else None
        start = self._reasoning_start(prompt, continued)
        return RenderedChat(self._prompts.encode(prompt), start if self.reasons else None)

    def _kwargs(self, options: TemplateOptions) -> dict[str, Any]:
        """The template's variables: those given, and what the effort is to this template."""
        text = self._prompts.text_for(options.tools)
        kwargs, effort = dict(options.kwargs or {}), options.reasoning_effort
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
