"""What a request's text must be: transformers' greedy continuation, and our own reference engine's, computed once.

The reference engine makes the text; one forward pass of transformers over prompt and text says whether each of its
tokens is the best one there. Where transformers' two best logits lie closer than `TIE_MARGIN` the position is a tie:
either token passes and its comparison of that text ends there. Our engine is compared with our reference: no ties.
"""

import functools
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from asks import Answer, Ask, Choice, sampling_params
from transformers import NemotronHForCausalLM, PreTrainedTokenizerBase

from mambalign.engine.checkpoint import load_tokenizer
from mambalign.engine.reference import Generation, ReferenceEngine
from mambalign.worker.sampling_params import TokenLogprobs

TIE_MARGIN = 1e-4
MAX_TIES_PER_TOKEN = 1 / 10_000


@dataclass(frozen=True)
class Expected:
    """A prompt's greedy continuation; end-of-text does not end it."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    num_sure_tokens: int  # before the first tie of transformers, all of them without one

    def cut(self, num_tokens: int) -> "Expected":
        sure = min(self.num_sure_tokens, num_tokens)
        return Expected(self.token_ids[:num_tokens], self.logprobs[:num_tokens], sure)


@dataclass
class Tally:
    """How much was compared with transformers in this session."""

    num_texts: int = 0
    num_tokens: int = 0
    num_ties: int = 0
    num_distinct_tokens: int = 0  # that an oracle had to compute

    @property
    def too_many_ties(self) -> bool:
        return self.num_ties > self.num_tokens * MAX_TIES_PER_TOKEN

    def describe(self) -> str:
        return (
            f"{self.num_texts:,} texts, {self.num_tokens:,} tokens compared with transformers "
            f"({self.num_distinct_tokens:,} distinct), {self.num_ties} ties"
        )


@dataclass(eq=False)
class Oracle:
    """Expected texts of one checkpoint, remembered for the session, and prompts whose texts hold no tie."""

    path: Path
    tally: Tally = field(default_factory=Tally)
    _expected: dict[tuple[int, ...], Expected] = field(default_factory=dict)
    _sampled: dict[tuple[tuple[int, ...], int | None, int], Generation] = field(default_factory=dict)
    _sources: dict[str, list[int]] = field(default_factory=dict)

    @functools.cached_property
    def transformers_model(self) -> NemotronHForCausalLM:
        return NemotronHForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    @functools.cached_property
    def reference(self) -> ReferenceEngine:
        return ReferenceEngine.load(self.path)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.path)

    def expected(self, prompt: Sequence[int], num_tokens: int) -> Expected:
        """The continuation by `num_tokens` tokens. AssertionError when reference and transformers disagree."""
        key = tuple(prompt)
        known = self._expected.get(key)
        if known is None or len(known.token_ids) < num_tokens:
            known = self._expected[key] = self._compute(list(prompt), num_tokens)
        return known.cut(num_tokens)

    def _compute(self, prompt: list[int], num_tokens: int) -> Expected:
        self.tally.num_distinct_tokens += num_tokens
        text = self.reference.generate(prompt, sampling_params(Ask(prompt, num_tokens, logprobs=True)))
        token_ids = text.token_ids
        best, margins = self.score(prompt, token_ids)
        sure = next((i for i, margin in enumerate(margins) if margin < TIE_MARGIN), num_tokens)
        wrong = [i for i in range(sure) if best[i] != token_ids[i]]
        assert not wrong, (
            f"token {wrong[0]} after a prompt of {len(prompt)}: the reference engine says {token_ids[wrong[0]]}, "
            f"transformers {best[wrong[0]]} with a margin of {margins[wrong[0]]:.2g}"
        )
        return Expected(token_ids, text.logprobs, sure)

    @torch.inference_mode()
    def score(self, prompt: list[int], token_ids: list[int]) -> tuple[list[int], list[float]]:
        """Transformers' own token at each position of a text, and the distance of its two best logits."""
        ids = torch.tensor([prompt + token_ids[:-1]])
        logits = self.transformers_model(ids, logits_to_keep=len(token_ids)).logits[0]
        top = logits.topk(2).values
        return logits.argmax(-1).tolist(), (top[:, 0] - top[:, 1]).tolist()

    def assert_text(
        self, prompt: Sequence[int], token_ids: list[int], logprobs: list[TokenLogprobs] | list[float] | None, what: str
    ) -> None:
        """`token_ids` are this prompt's text, bit for bit with `logprobs` (whole entries, or the tokens' own)."""
        expected = self.expected(prompt, len(token_ids))
        if token_ids != expected.token_ids:
            at = next(i for i, pair in enumerate(zip(token_ids, expected.token_ids, strict=True)) if pair[0] != pair[1])
            raise AssertionError(
                f"{what}: prompt of {len(prompt)} tokens, token {at} is {token_ids[at]}, "
                f"must be {expected.token_ids[at]}; {token_ids} != {expected.token_ids}"
            )
        if logprobs is not None:
            assert len(logprobs) == len(token_ids), f"{what}: {len(logprobs)} log-probabilities"
            for at, (got, wanted) in enumerate(zip(logprobs, expected.logprobs, strict=True)):
                same = got == (wanted.logprob if isinstance(got, float) else wanted)
                assert same, f"{what}: prompt of {len(prompt)} tokens, logprobs of token {at}: {got} != {wanted}"
        self.tally.num_texts += 1
        self.tally.num_tokens += expected.num_sure_tokens
        self.tally.num_ties += expected.num_sure_tokens < len(token_ids)

    def assert_sampled(self, ask: Ask, answer: Answer, what: str) -> None:
        """Each choice of a sampled answer is what the reference engine draws, bit for bit."""
        for index, choice in enumerate(answer.choices):
            key = (tuple(ask.prompt), ask.seed, index)
            if key not in self._sampled:
                self._sampled[key] = self.reference.generate(ask.prompt, sampling_params(ask), index)
            wanted = self._sampled[key]
            assert choice.token_ids == wanted.token_ids, f"{what}: choice {index}"
            chosen = [entry.logprob for entry in wanted.logprobs]
            assert chosen_logprobs(choice) == chosen, f"{what}: log-probabilities of choice {index}"

    # prompts

    def source(self, module: str) -> list[int]:
        """Token ids of a standard-library module's source text."""
        if module not in self._sources:
            text = inspect.getsource(importlib.import_module(module))
            self._sources[module] = self.tokenizer.encode(text, verbose=False)
        return self._sources[module]

    def prompt(
        self, module: str, length: int, num_tokens: int, prefix: Sequence[int] = (), suffix: Sequence[int] = ()
    ) -> list[int]:
        """`prefix`, a piece of the module's source, `suffix`: `length` tokens that continue by `num_tokens` tieless.

        Always the same prompt for the same arguments.
        """
        source, piece = self.source(module), length - len(prefix) - len(suffix)
        for start in range(0, len(source) - piece, 29):
            prompt = [*prefix, *source[start : start + piece], *suffix]
            if self.expected(prompt, num_tokens).num_sure_tokens == num_tokens:
                return prompt
        raise AssertionError(f"every piece of {module} has a tie")


def chosen_logprobs(choice: Choice) -> list[float]:
    """Of the tokens that were taken, whichever form the client gave them."""
    return [entry if isinstance(entry, float) else entry.logprob for entry in choice.logprobs or []]
