"""/v1/completions: read the body, start the generation, shape the answer."""

import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mambalign.engine.messages import EngineOutput, TokenLogprobs
from mambalign.engine.server.answer import Answer, check_stream_options, send_answer
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.generation import Choice, Generation, fit_params
from mambalign.engine.server.protocol import CompletionBody, parse_body, split_prompt
from mambalign.engine.server.state import STATE, ServerState
from mambalign.engine.server.token_text import CompletionLogprobs
from mambalign.worker.sampling_params import MAX_CHOICES, SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat goes on until it stops or the room ends


@dataclass(frozen=True)
class EchoedPrompt:
    text: str
    num_textless: int  # leading tokens that the tokenizer added: they are no part of the text


class CompletionAnswer(Answer):
    object_name = chunk_object_name = "text_completion"

    def __init__(self, state: ServerState, body: CompletionBody, echoed: list[EchoedPrompt]):
        """`echoed`: one a prompt when the body asks for echo, else empty."""
        super().__init__(state, body, "cmpl")
        self._echoed = echoed
        self._num_choices = body.n or 1  # a prompt
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice
        self._begun: set[int] = set()  # choices that sent a chunk

    def best_choices(self, choices: list[Choice]) -> list[Choice]:
        """Of every prompt's `best_of` choices the `n` likeliest, the first of equal ones first; numbered anew."""
        per_prompt, best = self.body.best_of or self._num_choices, []
        for start in range(0, len(choices), per_prompt):
            ranked = choices[start : start + per_prompt]
            if per_prompt > self._num_choices:
                ranked = sorted(ranked, key=lambda choice: -choice.mean_logprob)[: self._num_choices]
            best += ranked
        for index, choice in enumerate(best):
            choice.index = index
        return best

    def _lists(
        self, choice: Choice, ids: list[int], logprobs: list[TokenLogprobs | None] | None, num_textless: int = 0
    ) -> dict[str, list[Any]] | None:
        if logprobs is None or self.body.logprobs is None:
            return None
        style = self._logprobs.setdefault(choice.index, CompletionLogprobs(self.state.token_text))
        return style.add(ids, logprobs, num_textless)

    def _echo(self, choice: Choice) -> tuple[str, dict[str, list[Any]] | None]:
        """The prompt's text and lists; nothing without echo."""
        if not self._echoed:
            return "", None
        prompt = self._echoed[choice.index // self._num_choices]
        logprobs = [None, *(choice.prompt_logprobs or [])]
        return prompt.text, self._lists(choice, choice.prompt_token_ids, logprobs, prompt.num_textless)

    def _choice(self, choice: Choice, text: str, ids: list[int], lists: dict[str, list[Any]] | None) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": lists,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self.token_ids(ids),
        }

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        text, lists = self._echo(choice)
        of_output = self._lists(choice, choice.token_ids, choice.logprobs)
        if lists is not None and of_output is not None:
            of_output = {name: lists[name] + of_output[name] for name in lists}
        whole = self._choice(choice, text + choice.text, choice.token_ids, of_output)
        return whole | self.of_prompt(choice)

    def chunk_choices(self, choice: Choice, output: EngineOutput) -> list[dict[str, Any]]:
        """With echo, the first chunk of a choice is its prompt and nothing else."""
        chunks = []
        is_first = choice.index not in self._begun
        if is_first and self._echoed:
            text, lists = self._echo(choice)
            chunks.append(self._choice(choice, text, [], lists) | {"finish_reason": None, "stop_reason": None})
        if self.has_news(output):
            lists = self._lists(choice, output.new_token_ids, output.new_logprobs)
            chunks.append(self._choice(choice, output.new_text, output.new_token_ids, lists))
        if is_first and chunks:
            self._begun.add(choice.index)
            chunks[0] |= self.of_prompt(choice)
        return chunks


def completion_params(body: CompletionBody) -> SamplingParams:
    """The body's parameters, `best_of` and `echo` in terms of the engine's. Raises ApiError 400."""
    n, best_of = body.n or 1, body.best_of
    if best_of is not None and best_of < n:
        raise ApiError(400, f"best_of must be at least n ({n}), got {best_of}", param="best_of")
    if best_of is not None and best_of > MAX_CHOICES:
        raise ApiError(400, f"best_of must be from 1 to {MAX_CHOICES}, got {best_of}", param="best_of")
    changes: dict[str, Any] = {}
    if best_of is not None and best_of > n:
        if body.stream:
            raise ApiError(
                400, "best_of above n needs stream to be false: the best is known at the end", param="best_of"
            )
        changes = {"n": best_of, "logprobs": body.logprobs or 0}
    if body.echo and body.logprobs is not None:
        changes["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return body.sampling_params(**changes)


async def completions(request: web.Request) -> web.StreamResponse:
    """Texts that continue a prompt, or several."""
    state, arrival = request.app[STATE], time.monotonic()
    body = parse_body(await request.read(), CompletionBody)
    state.check_model(body.model)
    state.require_ready()
    check_stream_options(body)
    params = completion_params(body)
    scores_only = bool(body.echo) and body.max_tokens == 0  # one token is generated and not shown
    texts = split_prompt(body.prompt)
    state.admit(len(texts) * max(1, params.n), len(texts))  # before any is made into tokens
    prompts, fitted = [], []
    for text in texts:  # the first that is too long ends it
        if isinstance(text, str):
            state.check_length(text, "prompt")
            text = await state.encode(text)
        prompts.append(text)
        fitted.append(
            fit_params(
                state,
                params,
                prompts[-1],
                prompt_field="prompt",
                max_tokens=1 if scores_only else body.max_tokens,
                default_max_tokens=COMPLETION_MAX_TOKENS,
            )
        )
    await state.check_grammar(params.structured_outputs)
    echoed = [echoed_prompt(state, *pair) for pair in zip(texts, prompts, strict=True)] if body.echo else []
    generation = Generation(
        state, prompts, fitted, cache_salt=body.cache_salt, arrival=arrival, scores_only=scores_only
    )
    return await send_answer(request, CompletionAnswer(state, body, echoed), generation)


def echoed_prompt(state: ServerState, given: str | list[int], ids: list[int]) -> EchoedPrompt:
    if not isinstance(given, str):
        return EchoedPrompt(state.tokenizer.decode(ids), 0)
    start = state.tokenizer.bos_token
    added = start is not None and ids[0] == state.tokenizer.bos_token_id and not given.startswith(start)
    return EchoedPrompt(given, int(added))
