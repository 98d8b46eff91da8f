"""`LLM`: the engine in this process, for scripts and tests. Prompts in, finished texts out."""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mambalign.engine.client import OPENMP_SETTINGS, LocalClient, RequestFactory
from mambalign.engine.config import EngineConfig
from mambalign.engine.messages import EngineOutput, EngineRequest, TokenLogprobs
from mambalign.worker.sampling_params import SamplingParams

Prompt = str | list[int]


@dataclass
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # one per token, when asked for
    finish_reason: str | None = None  # "stop", "length"
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    num_draft_tokens: int = 0  # drafts verified
    num_accepted_tokens: int = 0  # of those, kept

    def add(self, output: EngineOutput) -> None:
        """Append what one step brought."""
        self.text += output.new_text
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs = (self.logprobs or []) + output.new_logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.num_draft_tokens = output.num_draft_tokens
        self.num_accepted_tokens = output.num_accepted_tokens


@dataclass
class RequestOutput:
    """One prompt and its choices."""

    prompt: str | None  # None for a prompt of token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # prompt tokens that choice 0 took from the prefix cache
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens but the first, when asked for

    @property
    def num_draft_tokens(self) -> int:
        """Of all choices."""
        return sum(output.num_draft_tokens for output in self.outputs)

    @property
    def num_accepted_tokens(self) -> int:
        """Of all choices."""
        return sum(output.num_accepted_tokens for output in self.outputs)


class LLM:
    """A loaded engine. Options are the command line's, with underscores: `LLM(spec_tokens=3, runner="v1")`.

    Raises ConfigError for options that cannot be served, before weights are loaded. `core` is an engine to use
    instead of loading one.
    """

    def __init__(self, model: str | None = None, *, core: Any = None, **options: Any):
        config = EngineConfig.from_options(model=model, **options)
        if core is None:
            for name, value in OPENMP_SETTINGS.items():
                os.environ.setdefault(name, value)
            from mambalign.engine.core import EngineCore  # only here: it imports torch

            core = EngineCore(config)
        self.core = core
        self._client = LocalClient(core)
        self._factory = RequestFactory(config.model.seed)
        atexit.register(self.shutdown)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids; one or a list), all in one batch, results in their order.

        `params`: one for all prompts, or one per prompt; `n` of them is the number of choices. Raises ValueError
        (the text names the field and the limit) before anything has run, RuntimeError if the engine fails.
        """
        if self.core is None:
            raise RuntimeError("this LLM has been shut down")
        prompt_list = split_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompt_list)
        if len(params) != len(prompt_list):
            raise ValueError(f"params: {len(params)} for {len(prompt_list)} prompts")
        results: list[RequestOutput] = []
        requests: list[EngineRequest] = []
        choices: dict[str, tuple[RequestOutput, CompletionOutput]] = {}  # by request id
        for prompt, one in zip(prompt_list, params, strict=True):
            one.validate(self.core.vocab_size)
            text = prompt if isinstance(prompt, str) else None
            token_ids = self.core.tokenizer.encode(prompt) if text is not None else list(prompt)
            split = self._factory.split(token_ids, one)
            result = RequestOutput(text, token_ids, [CompletionOutput(r.choice) for r in split])
            choices.update({r.request_id: (result, result.outputs[r.choice]) for r in split})
            results.append(result)
            requests.extend(split)
        for output in self._client.generate(requests):
            result, choice = choices[output.request_id]
            choice.add(output)
            if choice.index == 0:
                result.num_cached_tokens = output.num_cached_tokens
                result.prompt_logprobs = result.prompt_logprobs or output.prompt_logprobs
        return results

    def shutdown(self) -> None:
        """Let go of the engine and its memory. Safe to call twice; runs at exit."""
        self.core = self._client = None
        atexit.unregister(self.shutdown)


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text or one list of token ids is a list of one prompt. Raises ValueError for anything else."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    for item in prompts:
        if not isinstance(item, str | list | tuple):
            raise ValueError(f"prompts: must be texts or lists of token ids, got {type(item).__name__}")
    return prompts
