"""/v1/completions and /v1/chat/completions: read the body, start the generation, shape the answer."""

import time
from typing import Any

from aiohttp import web

from mambalign.engine.messages import EngineOutput
from mambalign.engine.server.answer import Answer, send_answer
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.generation import Choice, Generation, fit_params
from mambalign.engine.server.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    parse_body,
    split_prompt,
)
from mambalign.engine.server.state import STATE, ServerState
from mambalign.engine.server.token_text import CompletionLogprobs, chat_logprobs

COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat goes on until it stops or the room ends


class CompletionAnswer(Answer):
    object_name = chunk_object_name = "text_completion"

    def __init__(self, state: ServerState, body: CompletionBody):
        super().__init__(state, body, "cmpl")
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice

    def _choice(self, choice: Choice, text: str, ids: list[int], logprobs: list | None) -> dict[str, Any]:
        lists = None
        if logprobs is not None and self.body.logprobs is not None:
            style = self._logprobs.setdefault(choice.index, CompletionLogprobs(self.state.token_text))
            lists = style.add(ids, logprobs)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": lists,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self.token_ids(choice, ids),
        }

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, choice.text, choice.token_ids, choice.logprobs)

    def chunk_choices(self, choice: Choice, output: EngineOutput) -> list[dict[str, Any]]:
        if not self.has_news(output):
            return []
        return [self._choice(choice, output.new_text, output.new_token_ids, output.new_logprobs)]


class ChatAnswer(Answer):
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, state: ServerState, body: ChatBody):
        super().__init__(state, body, "chatcmpl")
        self._begun: set[int] = set()  # choices whose first chunk was sent

    def _choice(self, choice: Choice, part: dict[str, Any], ids: list[int], logprobs: list | None) -> dict[str, Any]:
        content = None
        if logprobs is not None and self.body.logprobs:
            content = chat_logprobs(self.state.token_text, ids, logprobs, self.body.top_logprobs or 0)
        return {
            "index": choice.index,
            **part,
            "logprobs": content,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self.token_ids(choice, ids),
        }

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"message": {"role": "assistant", "content": choice.text}}
        return self._choice(choice, message, choice.token_ids, choice.logprobs)

    def chunk_choices(self, choice: Choice, output: EngineOutput) -> list[dict[str, Any]]:
        """The first chunk of a choice says the role and nothing else."""
        chunks = []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            first = {"delta": {"role": "assistant", "content": ""}}
            chunks.append(self._choice(choice, first, [], None) | {"finish_reason": None, "stop_reason": None})
        if self.has_news(output):
            delta = {"delta": {"content": output.new_text} if output.new_text else {}}
            chunks.append(self._choice(choice, delta, output.new_token_ids, output.new_logprobs))
        return chunks


def check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")


async def completions(request: web.Request) -> web.StreamResponse:
    state, arrival = request.app[STATE], time.monotonic()
    body = parse_body(await request.read(), CompletionBody)
    state.check_model(body.model)
    state.require_ready()
    check_stream_options(body)
    prompts = [
        await state.encode(prompt) if isinstance(prompt, str) else prompt for prompt in split_prompt(body.prompt)
    ]
    params = [
        fit_params(
            state,
            body.sampling_params(),
            prompt,
            prompt_field="prompt",
            max_tokens=body.max_tokens,
            default_max_tokens=COMPLETION_MAX_TOKENS,
        )
        for prompt in prompts
    ]
    generation = Generation(state, prompts, params, cache_salt=body.cache_salt, arrival=arrival)
    return await send_answer(request, CompletionAnswer(state, body), generation)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state, arrival = request.app[STATE], time.monotonic()
    body = parse_body(await request.read(), ChatBody)
    state.check_model(body.model)
    state.require_ready()
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens are one field: give one", param="max_tokens")
    messages = [message.for_template() for message in body.messages]
    prompt = await state.encode_chat(messages, body.chat_template_kwargs)
    params = fit_params(
        state,
        body.sampling_params(logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        prompt,
        prompt_field="messages",
        max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        default_max_tokens=None,
    )
    generation = Generation(state, [prompt], [params], cache_salt=body.cache_salt, arrival=arrival)
    return await send_answer(request, ChatAnswer(state, body), generation)
