"""What all handlers share: the engine's client, the tokenizer, the metrics, and whether requests are taken."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from mambalign.engine.client import EngineClient
from mambalign.engine.core_process import Ready
from mambalign.engine.server.chat_messages import AnyMessage, messages_for_template
from mambalign.engine.server.chat_template import ChatTemplate, RenderedChat, TemplateOptions
from mambalign.engine.server.errors import ApiError, unavailable
from mambalign.engine.server.metrics import Metrics
from mambalign.engine.server.token_text import TokenText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class ServerState:
    client: EngineClient
    model_name: str
    api_key: str | None = None
    tokenizer: "PreTrainedTokenizerBase | None" = None  # filled while the engine loads, like the next two
    token_text: TokenText | None = None
    chat_template: ChatTemplate | None = None
    metrics: Metrics = field(default_factory=Metrics)
    draining: bool = False
    started: float = field(default_factory=time.time)
    num_handlers: int = 0  # that are at work now

    @property
    def is_ready(self) -> bool:
        return self.client.healthy and self.tokenizer is not None and not self.draining

    def require_ready(self) -> Ready:
        """The engine's facts. Raises ApiError 503 while it loads, drains, or is dead."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.client.error is not None:
            raise unavailable(str(self.client.error), "engine_unavailable")
        if self.client.ready is None or self.tokenizer is None:
            raise unavailable("the model is still loading", "loading")
        return self.client.ready

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not served; no name is this one."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"model {name!r} is not served here; this is {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's own start token if it adds one."""
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def encode_chat(self, messages: list[AnyMessage], options: TemplateOptions) -> RenderedChat:
        """A conversation in the checkpoint's chat template. Raises ApiError 400."""
        if not self.chat_template:
            raise ApiError(
                400,
                f"messages: {self.model_name} has no chat template; use /v1/completions, or start the server with "
                "--chat-template",
                param="messages",
                code="no_chat_template",
            )
        return await asyncio.to_thread(self.chat_template.render, messages_for_template(messages), options)


STATE = web.AppKey("state", ServerState)
