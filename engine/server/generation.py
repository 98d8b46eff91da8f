"""One HTTP request's texts: its prompts and choices, how they grow, what they cost.

Both completion endpoints run on this; they differ in how they read a body and shape an answer.
"""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mambalign.engine.errors import EngineError
from mambalign.engine.messages import EngineOutput, TokenLogprobs
from mambalign.engine.server.errors import ApiError, value_error
from mambalign.engine.server.state import EndedChoice, ServerState
from mambalign.worker.sampling_params import SamplingParams


@dataclass
class Choice:
    """One text. `index` counts over all prompts: prompt 0's n choices, then prompt 1's."""

    index: int
    prompt_token_ids: list[int]
    is_first_of_prompt: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens but the first
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    queue_seconds: float = 0.0  # from arrival to the first step
    first_token_time: float = 0.0  # monotonic seconds, like the next
    last_token_time: float = 0.0  # the arrival before the first token

    def add(self, output: EngineOutput) -> None:
        self.text += output.new_text
        self.token_ids += output.new_token_ids
        self.logprobs += output.new_logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.num_cached_tokens = output.num_cached_tokens
        self.queue_seconds = output.queue_seconds
        self.num_draft_tokens = output.num_draft_tokens
        self.num_accepted_tokens = output.num_accepted_tokens

    @property
    def mean_logprob(self) -> float:
        """How likely the model finds the text: a token's mean log-probability."""
        return sum(lp.logprob for lp in self.logprobs) / max(1, len(self.logprobs))


class Generation:
    """Runs prompts on the engine and keeps the books. Raises ApiError 400 at once for what can never run."""

    def __init__(
        self,
        state: ServerState,
        prompts: list[list[int]],
        params: list[SamplingParams],
        *,
        cache_salt: str | None,
        arrival: float,
        scores_only: bool = False,
    ):
        """`scores_only`: nothing that is generated is shown, or counts; the prompts' log-probabilities do."""
        state.admit(sum(one.n for one in params), len(prompts))
        self._state = state
        self._arrival = arrival
        self._scores_only = scores_only
        self._requests = []
        self._choices: dict[str, Choice] = {}  # by engine request id
        for prompt, one in zip(prompts, params, strict=True):
            state.metrics.observe_request(one.n, one.max_tokens)
            for request in state.client.factory.split(prompt, one, cache_salt or ""):
                self._requests.append(request)
                self._choices[request.request_id] = Choice(
                    index=len(self._choices),
                    prompt_token_ids=prompt,
                    is_first_of_prompt=request.choice == 0,
                    last_token_time=arrival,
                )

    @property
    def choices(self) -> list[Choice]:
        return list(self._choices.values())

    async def run(self) -> AsyncIterator[tuple[Choice, EngineOutput]]:
        """Each step's news of each choice, after it was added to the choice. Aborts if the consumer leaves."""
        metrics = self._state.metrics
        reason = "abort"
        try:
            async with contextlib.aclosing(self._state.client.generate(self._requests)) as outputs:
                async for output in outputs:
                    choice = self._choices[output.request_id]
                    now = time.monotonic()
                    if output.new_token_ids:
                        metrics.observe_tokens(
                            len(output.new_token_ids),
                            choice.last_token_time,
                            now,
                            is_first=choice.first_token_time == 0.0,
                        )
                        choice.first_token_time = choice.first_token_time or now
                        choice.last_token_time = now
                    if self._scores_only:
                        output = without_tokens(output)
                    choice.add(output)
                    if output.finish_reason:
                        metrics.observe_choice(
                            arrival=self._arrival,
                            queue_seconds=choice.queue_seconds,
                            first_token=choice.first_token_time or now,
                            now=now,
                            num_prompt=len(choice.prompt_token_ids),
                            num_output=len(choice.token_ids),
                        )
                        self._end(choice, output.finish_reason)
                    yield choice, output
            metrics.observe_end(max(len(choice.token_ids) for choice in self.choices))
        except EngineError:
            reason = "error"
            raise
        finally:
            for choice in self.choices:
                if choice.finish_reason is None:
                    self._end(choice, reason)

    def _end(self, choice: Choice, reason: str) -> None:
        """Book how a choice has ended."""
        self._state.metrics.finished.labels(reason).inc()
        first = choice.first_token_time
        self._state.recent.append(
            EndedChoice(
                ended=time.time(),
                finish_reason=reason,
                seconds=time.monotonic() - self._arrival,
                first_token_seconds=first - self._arrival if first else None,
                num_prompt_tokens=len(choice.prompt_token_ids),
                num_cached_tokens=choice.num_cached_tokens,
                num_output_tokens=len(choice.token_ids),
                num_accepted_tokens=choice.num_accepted_tokens,
            )
        )

    @property
    def deadline(self) -> float | None:
        """When the answer must have ended, in seconds of the event loop's clock."""
        limit = self._state.options.request_timeout
        return None if limit is None else self._arrival + limit

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many choices it has; cached is what choice 0 found."""
        firsts = [choice for choice in self.choices if choice.is_first_of_prompt]
        prompt_tokens = sum(len(choice.prompt_token_ids) for choice in firsts)
        completion_tokens = sum(len(choice.token_ids) for choice in self.choices)
        accepted = sum(choice.num_accepted_tokens for choice in self.choices)
        drafted = sum(choice.num_draft_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(c.num_cached_tokens for c in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }


def log_fields(generation: Generation, body: Any, tokenizer: Any, with_texts: bool) -> dict[str, Any]:
    """What the access log says of a generation; its texts only when asked for."""
    usage = generation.usage()
    fields = {
        "user": body.user,
        "stream": bool(body.stream),
        "choices": len(generation.choices),
        "finish_reasons": [choice.finish_reason or "abort" for choice in generation.choices],
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        **usage["prompt_tokens_details"],
        **usage["completion_tokens_details"],
    }
    if with_texts:
        firsts = [choice for choice in generation.choices if choice.is_first_of_prompt]
        fields["prompts"] = [tokenizer.decode(choice.prompt_token_ids) for choice in firsts]
        fields["texts"] = [choice.text for choice in generation.choices]
    return fields


def without_tokens(output: EngineOutput) -> EngineOutput:
    """As if no token had been asked for."""
    reason = output.finish_reason and "length"
    return msgspec.structs.replace(
        output,
        new_text="",
        new_token_ids=[],
        new_logprobs=None if output.new_logprobs is None else [],
        finish_reason=reason,
        stop_reason=None,
    )


def fit_params(
    state: ServerState,
    params: SamplingParams,
    prompt: list[int],
    *,
    prompt_field: str,
    max_tokens: int | None,
    default_max_tokens: int | None,
    max_tokens_field: str = "max_tokens",
    logprobs_field: str = "logprobs",
) -> SamplingParams:
    """Check a prompt and its parameters against the model. Raises ApiError 400 naming field and limit.

    `max_tokens` None is "not given": then `default_max_tokens`, or less where the room is less; None is all of it.
    """
    ready = state.require_ready()
    limit, vocab_size = ready.max_model_len, ready.vocab_size
    if not prompt:
        raise ApiError(400, f"{prompt_field} must hold at least one token", param=prompt_field)
    if not all(0 <= token_id < vocab_size for token_id in prompt):
        raise ApiError(400, f"{prompt_field} holds token ids outside 0..{vocab_size - 1}", param=prompt_field)
    room = limit - len(prompt)
    if room < 1:
        raise ApiError(
            400,
            f"{prompt_field} has {len(prompt)} tokens; the limit is {limit} with at least one token of output",
            param=prompt_field,
            code="context_length_exceeded",
        )
    if max_tokens is None:
        max_tokens = min(default_max_tokens or room, room)
    params = msgspec.structs.replace(params, max_tokens=max_tokens)
    try:
        params.validate(vocab_size)
    except ValueError as error:
        text = str(error)
        for name, field_name in (("max_tokens", max_tokens_field), ("logprobs", logprobs_field)):
            if text.startswith(f"{name} "):
                text = field_name + text.removeprefix(name)
        raise value_error(ValueError(text)) from error
    if params.max_tokens > room:
        raise ApiError(
            400,
            f"{max_tokens_field} is {params.max_tokens}, but {len(prompt)} prompt tokens leave room for {room} "
            f"(max_model_len {limit})",
            param=max_tokens_field,
            code="context_length_exceeded",
        )
    return params
