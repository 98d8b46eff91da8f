"""/v1/completions: read the body, start the generation, shape the answer."""

import time
from typing import Any

from aiohttp import web

from mambalign.engine.messages import EngineOutput
from mambalign.engine.server.answer import Answer, check_stream_options, send_answer
from mambalign.engine.server.generation import Choice, Generation, fit_params
from mambalign.engine.server.protocol import CompletionBody, parse_body, split_prompt
from mambalign.engine.server.state import STATE, ServerState
from mambalign.engine.server.token_text import CompletionLogprobs

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
