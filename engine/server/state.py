"""What all handlers share: the engine's client, the tokenizer, the metrics, and whether requests are taken."""

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from mambalign.engine.api_keys import ApiKeys
from mambalign.engine.client import EngineClient
from mambalign.engine.config import ServerConfig
from mambalign.engine.core_process import Ready
from mambalign.engine.errors import EngineError
from mambalign.engine.server.chat_template import ChatTemplate, RenderedChat, TemplateOptions
from mambalign.engine.server.errors import ApiError, unavailable
from mambalign.engine.server.grammar_check import COMPILE_SECONDS, GrammarCheck
from mambalign.engine.server.grammar_process import Vocabulary
from mambalign.engine.server.metrics import Metrics
from mambalign.engine.server.token_text import TokenText
from mambalign.worker.sampling_params import StructuredOutputs

RETRY_AFTER_SECONDS = 1  # what a refused client is told to wait
STATS_SECONDS = 2.0  # how long to wait for the statistics of an engine in the middle of a step
NUM_RECENT = 20  # requests that the dashboard shows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EndedChoice(msgspec.Struct, frozen=True):
    """One text that has ended, without a word of it."""

    ended: float  # seconds, time.time()
    finish_reason: str  # "stop", "length", "abort", "error"
    seconds: float  # from the request's arrival
    first_token_seconds: float | None  # the same, to its first token
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt
    num_output_tokens: int
    num_accepted_tokens: int  # of the output, drafted


@dataclass
class ServerState:
    client: EngineClient
    model_name: str
    options: ServerConfig = field(default_factory=ServerConfig)
    api_keys: ApiKeys = field(default_factory=lambda: ApiKeys([]))
    tokenizer: "PreTrainedTokenizerBase | None" = None  # filled while the engine loads, like the next two
    token_text: TokenText | None = None
    chat_template: ChatTemplate | None = None
    grammars: GrammarCheck | None = None  # made when the first request has a grammar
    metrics: Metrics = field(default_factory=Metrics)
    recent: deque[EndedChoice] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    draining: bool = False
    started: float = field(default_factory=time.time)
    num_handlers: int = 0  # that are at work now

    @property
    def cors_origins(self) -> set[str]:
        """Web origins whose pages may read answers."""
        return {origin.strip().rstrip("/") for origin in (self.options.cors_origins or "").split(",")} - {""}

    def admit(self, num_texts: int, num_prompts: int = 1) -> None:
        """Raise ApiError for a request of so many texts: 400 when it can never be taken in, 429 when not now."""
        limit = self.options.max_live_requests
        if num_texts > limit:
            name = "prompt" if num_prompts > 1 else "n"
            raise ApiError(
                400,
                f"{name}: this request asks for {num_texts} texts (prompts times choices); at most {limit} are taken",
                param=name,
            )
        if self.client.num_live_requests + num_texts > limit:
            raise ApiError(
                429,
                f"{self.client.num_live_requests} of {limit} texts are in work: try again later",
                code="queue_full",
                kind="rate_limit_error",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )

    async def refresh_stats(self) -> None:
        """Fetch the engine's statistics; the last known ones stay when it cannot answer."""
        if self.client.healthy:
            with contextlib.suppress(TimeoutError, EngineError):
                self.metrics.engine.stats = await asyncio.wait_for(self.client.stats(), STATS_SECONDS)

    @property
    def is_ready(self) -> bool:
        return self.client.healthy and self.tokenizer is not None and not self.draining

    def require_ready(self) -> Ready:
        """The engine's facts. Raises ApiError 503 while it loads, drains, or is dead."""
        if self.draining:
            raise unavailable("the server is shutting down", "shutting_down")
        if self.client.error is not None:
            raise unavailable(str(self.client.error), "engine_unavailable")
        if self.client.stalled is not None:
            raise unavailable(str(self.client.stalled), "engine_stalled")
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

    def check_length(self, text: str, name: str) -> None:
        """Raise ApiError 400 for a text that is too long however it falls into tokens.

        To find that out from the tokens would cost some hundred bytes of memory a character.
        """
        limit = self.require_ready().max_model_len
        most = limit * self.token_text.max_token_chars
        if len(text) > most:
            raise ApiError(
                400,
                f"{name} has {len(text)} characters; the limit is {limit} tokens, which hold at most {most}",
                param=name,
                code="context_length_exceeded",
            )

    async def check_grammar(self, wanted: StructuredOutputs | None) -> None:
        """Raise ApiError 400 for what the engine could not compile, or not while others wait."""
        if wanted is None:
            return
        if self.grammars is None:
            ready, tokenizer = self.require_ready(), self.tokenizer.backend_tokenizer.to_str()
            self.grammars = GrammarCheck(
                Vocabulary(tokenizer, ready.vocab_size, ready.eos_token_ids, seconds=COMPILE_SECONDS)
            )
        await self.grammars.check(wanted)

    async def close(self) -> None:
        """Let go of what requests have left."""
        if self.grammars is not None:
            await self.grammars.close()

    async def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's own start token if it adds one."""
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def encode_chat(self, messages: list[dict[str, Any]], options: TemplateOptions) -> RenderedChat:
        """A conversation, of messages as templates take them, in the chat template. Raises ApiError 400."""
        if not self.chat_template:
            raise ApiError(
                400,
                f"messages: {self.model_name} has no chat template; use /v1/completions, or start the server with "
                "--chat-template",
                param="messages",
                code="no_chat_template",
            )
        return await asyncio.to_thread(
            self.chat_template.render, messages, options, lambda text: self.check_length(text, "messages")
        )


STATE = web.AppKey("state", ServerState)
