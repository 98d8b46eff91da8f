"""The oracle itself: transformers' own step-by-step `generate` says the same, and ties are handled as promised."""

import pytest
import torch
from oracle import Expected, Oracle

NUM_TOKENS = 48


@pytest.mark.parametrize(("module", "length"), [("argparse", 1), ("queue", 31), ("zipfile", 150)])
def test_generate_says_the_same(oracle: Oracle, module: str, length: int) -> None:
    prompt = oracle.prompt(module, length, NUM_TOKENS)
    model = oracle.transformers_model
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    oracle.assert_text(prompt, ids[0, length:].tolist(), None, "transformers generate")


def test_ties_end_the_comparison_and_are_counted(oracle: Oracle) -> None:
    own = Oracle(oracle.path)
    prompt = oracle.prompt("bisect", 20, 12)
    known = oracle.expected(prompt, 12)
    own._expected[tuple(prompt)] = Expected(known.token_ids, known.logprobs, num_sure_tokens=5)
    own.assert_text(prompt, known.token_ids[:5], None, "up to the tie")
    assert (own.tally.num_tokens, own.tally.num_ties) == (5, 0) and not own.tally.too_many_ties
    own.assert_text(prompt, known.token_ids, known.logprobs, "over the tie")
    assert (own.tally.num_tokens, own.tally.num_ties) == (10, 1) and own.tally.too_many_ties
    own.tally.num_tokens = 10_000
    assert not own.tally.too_many_ties


def test_a_wrong_token_or_logprob_is_told(oracle: Oracle) -> None:
    prompt = oracle.prompt("bisect", 20, 12)
    known = oracle.expected(prompt, 12)
    wrong = [*known.token_ids[:7], (known.token_ids[7] + 1) % 4096, *known.token_ids[8:]]
    with pytest.raises(AssertionError, match=f"token 7 is {wrong[7]}, must be {known.token_ids[7]}"):
        oracle.assert_text(prompt, wrong, None, "here")
    floats = [entry.logprob for entry in known.logprobs]
    floats[3] += 1e-7
    with pytest.raises(AssertionError, match="logprobs of token 3"):
        oracle.assert_text(prompt, known.token_ids, floats, "here")
