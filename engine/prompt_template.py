"""A checkpoint's chat template: what a conversation is to the model, for the server and for `LLM.chat`.

Templates run in transformers' jinja sandbox. What is asked of a template that knows nothing of it is refused: it would
change nothing.
"""

import inspect
import re
from typing import TYPE_CHECKING, Any

import jinja2

from mambalign.engine.option import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TemplateError(ValueError):
    """A conversation that cannot be rendered. The text names `param`, the field that is wrong."""

    def __init__(self, text: str, param: str, code: str | None = None):
        super().__init__(text)
        self.param, self.code = param, code


class PromptTemplate:
    """`text` replaces the tokenizer's own template. Raises ConfigError for one that jinja cannot read."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", text: str | None = None):
        self._tokenizer = tokenizer
        own = text or tokenizer.chat_template or ""
        self._texts: dict[str, str] = own if isinstance(own, dict) else {"default": own}
        if not all(isinstance(each, str) for each in self._texts.values()):
            raise ConfigError("the chat template cannot be read: it is no text")
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
        return bool(self.text_for(None))

    @property
    def every_text(self) -> str:
        """The templates of a checkpoint that has several, one behind the other."""
        return "\n".join(self._texts.values())

    def text_for(self, tools: list[dict[str, Any]] | None) -> str:
        """The template that renders a conversation with these tools."""
        return self._texts.get("tool_use" if tools and "tool_use" in self._texts else "default", "")

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; `encode` makes its token ids. Raises TemplateError.

        add_generation_prompt: end with the head of the assistant's reply (None: unless the final message is continued).
        kwargs: more variables of the template.
        """
        if not messages:
            raise TemplateError("messages must hold at least one message", "messages")
        text = self.text_for(tools)
        self._check_kwargs(text, kwargs or {})
        if tools and not mentions(text, "tools"):
            message = "tools are not supported: this model's chat template takes none; leave them out"
            raise TemplateError(message, "tools", "unsupported_parameter")
        continues = bool(continue_final_message)
        adds = not continues if add_generation_prompt is None else add_generation_prompt
        if continues and adds:
            message = "continue_final_message and add_generation_prompt ask for opposite things: give one"
            raise TemplateError(message, "continue_final_message")
        if continues and messages[-1]["role"] != "assistant":
            message = "continue_final_message needs a final message of the assistant"
            raise TemplateError(message, "continue_final_message")
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=text,
                tokenize=False,
                add_generation_prompt=adds,
                continue_final_message=continues,
                **(kwargs or {}),
            )
        except Exception as error:  # templates are programs: they refuse in their own words
            raise TemplateError(f"messages: the chat template refused them: {error}", "messages") from error

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a rendered conversation: the template has written the start token, if there is one."""
        return self._tokenizer.encode(rendered, add_special_tokens=False)

    def _check_kwargs(self, text: str, kwargs: dict[str, Any]) -> None:
        for name in kwargs:
            path = f"chat_template_kwargs.{name}"
            if name in self._reserved:
                raise TemplateError(f"{path} is set by the engine: leave it out", path)
            if not mentions(text, name):
                raise TemplateError(f"{path} is not used by this model's chat template: leave it out", path)


def mentions(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None
