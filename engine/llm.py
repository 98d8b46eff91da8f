"""`LLM`: the engine in this process, for scripts and tests. Prompts or conversations in, finished texts out."""

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Self

from tqdm import tqdm

from mambalign.engine.checkpoint import load_chat_template
from mambalign.engine.client import OPENMP_SETTINGS
from mambalign.engine.config import EngineConfig
from mambalign.engine.local_client import LocalClient
from mambalign.engine.messages import EngineOutput, EngineRequest, TokenLogprobs
from mambalign.engine.prompt_template import PromptTemplate
from mambalign.engine.request_factory import RequestFactory
from mambalign.worker.sampling_params import SamplingParams

Prompt = str | list[int]
Params = SamplingParams | Iterable[SamplingParams] | None
Conversation = list[dict[str, Any]]  # messages as chat templates take them: {"role": "user", "content": "Hello"}


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

    prompt: str | None  # of a conversation what the template made of it; None for a prompt of token ids
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
    instead of loading one. As a context manager it lets go of the engine's memory at the end. Threads may share one:
    their calls run one after the other.
    """

    def __init__(self, model: str | None = None, *, core: Any = None, **options: Any):
        config = EngineConfig.from_options(model=model, **options)
        self._empty_device_cache: Callable[[], None] | None = None
        if core is None:
            for name, value in OPENMP_SETTINGS.items():
                os.environ.setdefault(name, value)
            from mambalign.engine.core import EngineCore, empty_device_cache  # only here: it imports torch

            core = EngineCore(config)
            self._empty_device_cache = empty_device_cache
        self.core = core
        self._client = LocalClient(core)
        self._turn = threading.Lock()  # held by the call that runs
        self._factory = RequestFactory(config.model.seed)
        atexit.register(self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params = None, *, use_tqdm: bool | None = None
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids; one or a list), all in one batch, results in their order.

        `params`: one for all prompts, or one per prompt; `n` of them is the number of choices. `use_tqdm`: show the
        progress on stderr (None: if that is a terminal). Raises ValueError (the text names the field and the limit)
        before anything has run, RuntimeError if the engine fails. Ctrl-C ends the texts that run, and takes effect
        between two steps.
        """
        self._require_core()
        encoded = [
            (prompt, self.core.tokenizer.encode(prompt)) if isinstance(prompt, str) else (None, list(prompt))
            for prompt in split_prompts(prompts)
        ]
        return self._complete(encoded, params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        params: Params = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """The assistant's next message in each conversation (one or a list); otherwise as `generate`.

        `chat_template`: a jinja file or the template itself (None: the checkpoint's); `chat_template_kwargs`: more
        variables for it. `add_generation_prompt`: end with the head of a reply (None: yes, unless the final message
        is continued, which `continue_final_message` asks for).
        """
        self._require_core()
        template = PromptTemplate(self.core.tokenizer, chat_template and load_chat_template(chat_template))
        if not template:
            raise ValueError("messages: this model has no chat template; give one as chat_template, or use generate")
        rendered = [
            template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=chat_template_kwargs,
            )
            for conversation in split_conversations(messages)
        ]
        for text in rendered:
            check_text(text, "messages")
        return self._complete([(text, template.encode(text)) for text in rendered], params, use_tqdm)

    def _complete(
        self, prompts: list[tuple[str | None, list[int]]], params: Params, use_tqdm: bool | None
    ) -> list[RequestOutput]:
        """Run prompts, each its text if there is one and its token ids."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        params = as_list(params, "params")
        for i, one in enumerate(params):
            if not isinstance(one, SamplingParams):
                raise ValueError(f"params[{i}]: must be SamplingParams, got {type(one).__name__}")
        if len(params) != len(prompts):
            raise ValueError(f"params: {len(params)} for {len(prompts)} prompts")
        results: list[RequestOutput] = []
        requests: list[EngineRequest] = []
        choices: dict[str, tuple[RequestOutput, CompletionOutput]] = {}  # by request id
        for (text, token_ids), one in zip(prompts, params, strict=True):
            one.validate(self.core.vocab_size)
            split = self._factory.split(token_ids, one)
            result = RequestOutput(text, token_ids, [CompletionOutput(r.choice) for r in split])
            choices.update({r.request_id: (result, result.outputs[r.choice]) for r in split})
            results.append(result)
            requests.extend(split)
        is_shown = sys.stderr.isatty() if use_tqdm is None else use_tqdm
        num_tokens = 0
        with (
            self._turn,
            tqdm(total=len(requests), unit="text", miniters=0, disable=not is_shown) as bar,
            closing(self._client.generate(requests)) as outputs,
        ):
            for output in outputs:
                result, choice = choices[output.request_id]
                choice.add(output)
                if choice.index == 0:
                    result.num_cached_tokens = output.num_cached_tokens
                    result.prompt_logprobs = result.prompt_logprobs or output.prompt_logprobs
                num_tokens += len(output.new_token_ids)
                if is_shown:
                    rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                    bar.update(output.finish_reason is not None)
        return results

    def _require_core(self) -> None:
        if self.core is None:
            raise RuntimeError("this LLM has been shut down")

    def shutdown(self) -> None:
        """Let go of the engine and its memory. Safe to call twice; runs at exit."""
        if self.core is None:
            return
        self.core = self._client = None
        atexit.unregister(self.shutdown)
        gc.collect()  # an engine refers to itself
        if self._empty_device_cache is not None:
            self._empty_device_cache()


def as_list(values: Any, name: str) -> list[Any]:
    """What a caller gave for several. Raises ValueError for what has no order, or is one thing."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | dict | set):
        raise ValueError(f"{name}: one or a list of them is needed, got {type(values).__name__}")
    return list(values)


def check_text(text: str, name: str) -> None:
    """Raise ValueError for a text that no tokenizer takes: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: is no Unicode text: {error}") from error


def split_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One text or one list of token ids is a list of one prompt. Raises ValueError for anything else."""
    if isinstance(prompts, str):
        prompts = [prompts]
    prompts = as_list(prompts, "prompts")
    if prompts and all(isinstance(item, int) for item in prompts):
        prompts = [prompts]
    for i, item in enumerate(prompts):
        if isinstance(item, str):
            check_text(item, f"prompts[{i}]")
        elif not isinstance(item, list | tuple):
            raise ValueError(f"prompts[{i}]: must be a text or a list of token ids, got {type(item).__name__}")
        elif wrong := [token_id for token_id in item if type(token_id) is not int]:
            raise ValueError(f"prompts[{i}]: token ids must be integers, got {wrong[0]!r}")
    return prompts


def split_conversations(messages: Conversation | Iterable[Conversation]) -> list[Conversation]:
    """One conversation is a list of one. Raises ValueError for a message that has no role or no content."""
    messages = as_list(messages, "messages")
    conversations = [messages] if messages and isinstance(messages[0], dict) else messages
    for conversation in conversations:
        for i, message in enumerate(as_list(conversation, "messages[0]")):
            if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
                raise ValueError(f"messages[{i}]: must be a dict with role and content, got {message!r}")
    return conversations
