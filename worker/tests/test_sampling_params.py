"""Limits of every sampling field, and what the constructor takes."""

import subprocess
import sys

import msgspec
import pytest

from mambalign.worker.sampling_params import SamplingParams, StructuredOutputs

NAN, INF = float("nan"), float("inf")

REFUSED = {
    "max_tokens": [0, -1, 1.5, True, None, "3"],
    "min_tokens": [-1, 17, 1.0],
    "temperature": [-0.1, 2.5, NAN, INF, "1", None, True],
    "top_p": [0, -0.01, 1.01, NAN],
    "top_k": [-2, 1.5],
    "min_p": [-0.01, 1.01, NAN],
    "seed": [2**63, -(2**63) - 1, 0.5],
    "presence_penalty": [-2.01, 2.01, NAN],
    "frequency_penalty": [-2.01, 2.01, -INF],
    "repetition_penalty": [0, -1.0, NAN, INF],
    "logit_bias": [{100: 1.0}, {-1: 1.0}, {5: 100.5}, {5: NAN}, {5: None}, {"5": 1.0}, [5]],
    "logprobs": [-1, 21, True, 0.0],
    "prompt_logprobs": [-1, 21, True, 0.0],
    "stop": [["x"] * 17, [""], [3], 3, ["x" * 1025]],
    "stop_token_ids": [[-1], [100], ["a"], 7, [1] * 129],
    "ignore_eos": [None, 1],
    "skip_special_tokens": [None, "no"],
    "structured_outputs": ["x"],
    "n": [0, 129, 1.0],
}
ACCEPTED = {
    "max_tokens": [16, 10**9],
    "min_tokens": [0, 16],
    "temperature": [0, 0.0, 2, 2.0],
    "top_p": [1e-9, 1, 0.5],
    "top_k": [-1, 0, 1, 10**6],
    "min_p": [0.0, 1.0],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "presence_penalty": [-2, 2.0],
    "frequency_penalty": [-2, 2.0],
    "repetition_penalty": [1e-9, 3],
    "logit_bias": [{}, None, {0: -100, 99: 100.0}],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "stop": [[], None, "END", ["x" * 1024] * 16],
    "stop_token_ids": [[], None, [0, 99]],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "structured_outputs": [None, StructuredOutputs(json=False), StructuredOutputs(choice=["a"])],
    "n": [1, 128],
}


def cases(table):
    return [(field, value) for field, values in table.items() for value in values]


def test_the_tables_hold_every_field():
    assert set(REFUSED) == set(ACCEPTED) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(("field", "value"), cases(REFUSED))
def test_refused_with_the_field_the_limit_and_the_value(field, value):
    with pytest.raises(ValueError, match=rf"^{field}\b.* must .*, got ") as refusal:
        SamplingParams(**{field: value}).validate(vocab_size=100)
    if not isinstance(value, list | dict):
        assert str(value) in str(refusal.value)


@pytest.mark.parametrize(("field", "value"), cases(ACCEPTED))
def test_accepted_at_the_limits(field, value):
    SamplingParams(**{field: value}).validate(vocab_size=100)


def test_none_and_a_plain_string_become_what_they_mean():
    params = SamplingParams(stop="END", stop_token_ids=None, logit_bias=None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (["END"], [], {})
    assert SamplingParams(stop=None).stop == []


def test_unknown_names_are_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_survives_the_way_between_processes():
    params = SamplingParams(logit_bias={7: -1.5}, stop=["a"], seed=-(2**63), logprobs=0, temperature=0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.json.decode(b'{"logit_bias": {"7": 2}}', type=SamplingParams).logit_bias == {7: 2.0}


def test_what_a_request_needs():
    greedy = SamplingParams(temperature=0)
    assert greedy.is_greedy and greedy.is_plain_greedy and not greedy.changes_logits
    assert not SamplingParams().is_greedy
    assert not SamplingParams(temperature=0, logprobs=0).is_plain_greedy
    for fields in ({"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}):
        params = SamplingParams(temperature=0, **fields)
        assert params.needs_history and params.changes_logits and not params.is_plain_greedy
    for fields in ({"logit_bias": {1: 1.0}}, {"min_tokens": 1}):
        params = SamplingParams(temperature=0, **fields)
        assert params.changes_logits and not params.needs_history and not params.is_plain_greedy


def test_no_torch_on_the_api_side():
    code = "import mambalign.worker.sampling_params, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "wrong",
    [{}, {"regex": "a", "json_object": True}, {"choice": []}, {"choice": ["a", ""]}, {"json_object": False},
     {"regex": "a" * (1 << 18)}],
)  # fmt: skip
def test_structured_outputs_are_one_of_five(wrong):
    with pytest.raises(ValueError, match=r"^structured_outputs.* must .*, got"):
        SamplingParams(structured_outputs=StructuredOutputs(**wrong)).validate(vocab_size=100)


@pytest.mark.parametrize("other", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_a_grammar_says_where_the_text_ends(other):
    with pytest.raises(ValueError, match=f"^{next(iter(other))} cannot be used with structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **other).validate(vocab_size=100)
