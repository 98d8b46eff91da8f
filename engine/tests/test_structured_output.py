"""Structured output on the model that ships: always as asked, and the same with and without drafts, on both runners."""

import json
import re

import pytest

from mambalign.engine import LLM, SamplingParams, StructuredOutputs
from mambalign.engine.checkpoint import DEFAULT_MODEL

pytestmark = pytest.mark.skipif(not (DEFAULT_MODEL / "config.json").exists(), reason="no model ships here")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["int", "str", None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "kind", "sizes", "ok"],
    "additionalProperties": False,
}
CALLS = r"(import [a-z]{1,8}\n){3}def [a-z_]{1,10}\(self\):\n    return (self\.[a-z]{1,6}|None)\n"
FORMS = [
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(regex=CALLS),
    StructuredOutputs(choice=["import os", "import sys\n", "class"]),
    StructuredOutputs(grammar='start: "[" item ("," item)* "]"\nitem: /[0-9]{1,3}/ | "None"'),
]
PROMPT = "import os\nimport sys\n\n\ndef read(path):\n    return "


def requests() -> tuple[list[str], list[SamplingParams]]:
    """Rows with a grammar, greedy and sampled, between rows without one."""
    params = []
    for i, form in enumerate([*FORMS, FORMS[1]]):
        sampled = {"temperature": 0.8, "seed": i, "top_p": 0.9} if i % 2 else {"temperature": 0}
        params.append(SamplingParams(max_tokens=250, structured_outputs=form, logprobs=1, **sampled))
        params.append(SamplingParams(max_tokens=40, **sampled))
    params[-2] = SamplingParams(
        max_tokens=120, temperature=0, structured_outputs=FORMS[1], frequency_penalty=0.5, logit_bias={5: 3.0}
    )
    return [PROMPT] * len(params), params


def run(**options: object) -> list[tuple]:
    llm = LLM(max_model_len=512, cache_memory="64MiB", **options)
    results = llm.generate(*requests())
    llm.core.check()
    accepted = sum(result.num_accepted_tokens for result in results[::2])
    assert (accepted > 0) == bool(options.get("spec_tokens")), "drafts under a grammar were not kept"
    llm.shutdown()
    return [(r.outputs[0].text, r.outputs[0].token_ids, r.outputs[0].logprobs, r.outputs[0].finish_reason)
            for r in results]  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> list[tuple]:
    return run(spec_tokens=0, runner="v1")


def test_the_text_is_as_asked(plain: list[tuple]) -> None:
    texts = [text for text, _, _, reason in plain[::2] if reason == "stop"]
    assert len(texts) == 5
    value = json.loads(texts[0])
    assert set(value) == set(SCHEMA["required"]) and value["kind"] in ("int", "str", None)
    assert re.fullmatch(CALLS, texts[1]) and re.fullmatch(CALLS, texts[4])
    assert texts[2] in FORMS[2].choice and re.fullmatch(r"\[(\d{1,3}|None)(,(\d{1,3}|None))*\]", texts[3])


@pytest.mark.parametrize("options", [
    {"spec_tokens": 3, "runner": "v1"},
    {"spec_tokens": 0, "runner": "v2"},
    {"spec_tokens": 3, "runner": "v2"},
    {"spec_tokens": 7, "runner": "v2", "spec_method": "ngram"},
    {"spec_tokens": 3, "runner": "v2", "max_num_seqs": 2},
], ids=str)  # fmt: skip
def test_the_same_bits_with_drafts_and_on_both_runners(plain: list[tuple], options: dict) -> None:
    assert run(**options) == plain


def test_preempted_rows_go_on_in_their_grammar(plain: list[tuple]) -> None:
    preempted = []
    llm = LLM(max_model_len=512, cache_memory="64MiB", spec_tokens=3, runner="v1")
    scheduler, schedule = llm.core.scheduler, llm.core.scheduler.schedule

    def preempt_now_and_then():
        if scheduler.running and len(preempted) < 6 and scheduler.counters.generation_tokens > 20 * len(preempted):
            preempted.append(scheduler.running[-1].request_id)
            scheduler._preempt(scheduler.running[-1])
        return schedule()

    scheduler.schedule = preempt_now_and_then
    results = llm.generate(*requests())
    assert len(preempted) == 6
    assert [(r.outputs[0].text, r.outputs[0].token_ids) for r in results] == [row[:2] for row in plain]


def test_a_wrong_grammar_is_the_users_mistake() -> None:
    llm = LLM(max_model_len=512, cache_memory="64MiB", spec_tokens=0)
    with pytest.raises(ValueError, match="structured_outputs: the grammar cannot be used"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs(regex="(")))
    with pytest.raises(ValueError, match="min_tokens cannot be used with structured_outputs"):
        llm.generate("x", SamplingParams(structured_outputs=FORMS[0], min_tokens=3))
    llm.core.check()
