"""The reference engine: transformers' greedy text on the model that ships; endings, log-probabilities and seeds."""

import pytest
import torch
from transformers import NemotronHForCausalLM, PreTrainedTokenizerFast

from mambalign.engine.checkpoint import DEFAULT_MODEL
from mambalign.engine.reference import ReferenceEngine
from mambalign.worker.sampling_params import SamplingParams

SOURCE = '''import os
from dataclasses import dataclass


@dataclass
class Account:
    """A bank account."""

    owner: str
    balance: float = 0.0

    def deposit(self, amount):
        """Add `amount` to the balance."""
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
'''
TIE = 1e-4  # a smaller margin between transformers' two best tokens is a tie
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference() -> ReferenceEngine:
    return ReferenceEngine.load(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEFAULT_MODEL)
    return [tokenizer(text).input_ids for text in ("def main(", SOURCE, SOURCE * 3)]


@torch.inference_mode()
def test_greedy_text_is_that_of_transformers(reference: ReferenceEngine, prompts: list[list[int]]) -> None:
    """One pass of transformers over prompt and answer tells the best token at every position, and by how much."""
    oracle = NemotronHForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
    for prompt in prompts:
        answer = reference.generate(prompt, SamplingParams(max_tokens=64, **GREEDY))
        assert answer.finish_reason == "length" and len(answer.token_ids) == 64
        logits = oracle(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        is_clear = best.values[:, 0] - best.values[:, 1] > TIE
        wrong = is_clear & (best.indices[:, 0] != torch.tensor(answer.token_ids))
        assert not wrong.any(), f"token {int(wrong.nonzero()[0])} after a prompt of {len(prompt)}"
        assert is_clear.float().mean() > 0.99


def test_generate_is_that_of_transformers(reference: ReferenceEngine, prompts: list[list[int]]) -> None:
    oracle = NemotronHForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
    prompt = torch.tensor([prompts[1]])
    theirs = oracle.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
    assert reference.generate(prompts[1], SamplingParams(max_tokens=24, **GREEDY)).token_ids == theirs.tolist()


def test_a_longer_prompt_goes_on_where_a_shorter_one_went(reference: ReferenceEngine, prompts: list[list[int]]) -> None:
    """Prefill and decode are one computation: the answer's tail, asked for as an answer to its head, is the same."""
    params = SamplingParams(max_tokens=20, logprobs=3, **GREEDY)
    whole = reference.generate(prompts[0], params)
    rest = reference.generate(prompts[0] + whole.token_ids[:7], SamplingParams(max_tokens=13, logprobs=3, **GREEDY))
    assert rest.token_ids == whole.token_ids[7:]
    assert rest.logprobs == whole.logprobs[7:]


def test_endings(reference: ReferenceEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = reference.generate(prompts[0], SamplingParams(max_tokens=12, **GREEDY)).token_ids
    stop = greedy[3]
    first = greedy.index(stop)
    stopped = reference.generate(prompts[0], SamplingParams(max_tokens=12, stop_token_ids=[stop], **GREEDY))
    assert (stopped.token_ids, stopped.finish_reason) == (greedy[: first + 1], "stop")
    biased = SamplingParams(max_tokens=12, temperature=0.0, logit_bias={reference.model.eos_token_ids[0]: 100.0})
    assert reference.generate(prompts[0], biased).token_ids == [reference.model.eos_token_ids[0]]
    monkeypatch.setattr(reference.model, "max_model_len", len(prompts[0]) + 2)
    last = reference.generate(prompts[0], SamplingParams(max_tokens=12, **GREEDY))
    assert (len(last.token_ids), last.finish_reason) == (2, "length")


def test_a_sampled_text_is_a_function_of_seed_and_choice(reference: ReferenceEngine, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=5, ignore_eos=True)
    texts = [reference.generate(prompts[0], params, choice).token_ids for choice in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
