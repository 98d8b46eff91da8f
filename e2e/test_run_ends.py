"""An end at every position of an accepted run: as if tokens had come one at a time.

The real engine, whose drafts are all right by script, so that every step keeps a whole run: stop tokens, stop strings
and caps fall before, on and behind each other within one run and over two.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from oracle import Oracle
from scripted_engine import ScriptedEngine

from mambalign.engine.llm import CompletionOutput
from mambalign.worker.sampling_params import SamplingParams

NUM_TOKENS = 24


@pytest.fixture(scope="module", params=[("v1", 1), ("v2", 3), ("v1", 7)], ids=str)
def engine(request: pytest.FixtureRequest, oracle: Oracle) -> Iterator[ScriptedEngine]:
    runner, spec_tokens = request.param
    engine = ScriptedEngine(
        oracle, runner=runner, spec_tokens=spec_tokens, cache_memory="64MiB", max_model_len=512, device="cpu"
    )
    yield engine
    engine.client.close()


@pytest.fixture(scope="module")
def prompt(oracle: Oracle) -> list[int]:
    return oracle.source("dataclasses")[:40]


def ask(engine: ScriptedEngine, prompt: list[int], true: list[int], **params: Any) -> CompletionOutput:
    """The answer of the engine, whose drafts are the text `true`; from an empty cache."""
    engine.write([prompt], [[]], [true])
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 3, "seed": 0} | params
    (result,) = engine.client.llm.generate([prompt], [SamplingParams(**fields)])
    (output,) = result.outputs
    assert result.num_accepted_tokens > 0 or len(output.token_ids) <= 2
    while engine.core.has_work():  # a step that was launched before the end was known
        assert not engine.core.step()
    engine.client.assert_idle()
    return output


def test_stop_token_and_cap(engine: ScriptedEngine, prompt: list[int]) -> None:
    text = engine.oracle.expected(prompt, NUM_TOKENS)
    for position in range(2 * engine.core.spec_tokens + 3):
        stop = text.token_ids[position]
        first = text.token_ids.index(stop) + 1  # tokens up to the first that ends the text
        for cap in {max(1, first - 1), first, first + 1}:
            output = ask(engine, prompt, text.token_ids, stop_token_ids=[stop], max_tokens=cap)
            assert output.token_ids == text.token_ids[: min(cap, first)]
            assert output.finish_reason == ("length" if cap < first else "stop")
            assert output.logprobs == text.logprobs[: min(cap, first)]


def test_stop_string(engine: ScriptedEngine, prompt: list[int]) -> None:
    decode, text = engine.oracle.tokenizer.decode, engine.oracle.expected(prompt, NUM_TOKENS)
    whole = decode(text.token_ids)
    for start in range(min(12, len(whole) - 4)):
        for width in (1, 4):
            stop = whole[start : start + width]
            output = ask(engine, prompt, text.token_ids, stop=[stop])
            num_tokens = len(output.token_ids)
            assert output.text == whole[: whole.index(stop)] and output.finish_reason == "stop"
            assert stop in decode(output.token_ids) and stop not in decode(output.token_ids[:-1])
            assert output.token_ids == text.token_ids[:num_tokens] and output.logprobs == text.logprobs[:num_tokens]


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 0.8, "seed": 5, "top_p": 0.9},
        {"logit_bias": {10: 5.0, 11: -100.0}},
    ],
    ids=lambda params: next(iter(params)),
)
def test_what_changes_the_choice(engine: ScriptedEngine, prompt: list[int], params: dict[str, Any]) -> None:
    fields = {"temperature": 0.0, "seed": 0} | params
    wanted = engine.oracle.reference.generate(
        prompt, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, **fields)
    )
    for num_tokens in (1, 2, NUM_TOKENS - 1, NUM_TOKENS):
        output = ask(engine, prompt, wanted.token_ids, max_tokens=num_tokens, **params)
        assert output.token_ids == wanted.token_ids[:num_tokens] and output.finish_reason == "length"
        assert output.logprobs == wanted.logprobs[:num_tokens]
