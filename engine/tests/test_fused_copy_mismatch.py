"""A wrong fused copy while serving: its request fails, once and with a reason; the others go on; it can be seen."""

import logging

import pytest
from broken_copy import BrokenCopy
from run_core import run, token_ids
from server_process import ServerProcess, call, metrics_text

from mambalign.engine import LLM, SamplingParams
from mambalign.engine.checkpoint import DEFAULT_MODEL
from mambalign.engine.core import EngineCore
from mambalign.engine.messages import EngineOutput, EngineRequest
from mambalign.worker import mamba_gpu_context

pytestmark = pytest.mark.skipif(not (DEFAULT_MODEL / "config.json").exists(), reason="no model ships here")

NUM_TOKENS = 40
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PROMPTS = {
    "a": "import os\nimport sys\n\n\ndef main(argv):\n    ",
    "b": "class Account:\n    def deposit(self, amount):\n        ",
    "c": "for i in range(10):\n    for j in range(",
}
CELLS = [("v1", "SD", 1), ("v1", "DS", 2), ("v2", "SD", 2), ("v2", "DS", 1)]


def load(runner: str, layout: str) -> EngineCore:
    return LLM(
        runner=runner,
        mamba_conv_layout=layout,
        spec_tokens=3,
        mamba_block_size=16,
        max_model_len=256,
        max_num_seqs=4,
        cache_memory=16 << 20,
        check_fused_copy=True,
    ).core


def add(core: EngineCore, request_id: str, prompt: str) -> None:
    core.add_request(EngineRequest(request_id, core.tokenizer.encode(PROMPTS[prompt]), PARAMS))


def run_all(core: EngineCore) -> dict[str, list[EngineOutput]]:
    for name in PROMPTS:
        add(core, name, name)
    return run(core)


def plant(monkeypatch: pytest.MonkeyPatch, core: EngineCore, **how: int) -> BrokenCopy:
    broken = BrokenCopy(mamba_gpu_context.precopy_mamba_align_fused, core.runner.cache, **how)
    monkeypatch.setattr(mamba_gpu_context, "precopy_mamba_align_fused", broken)
    return broken


@pytest.mark.parametrize(("runner", "layout", "num_faults"), CELLS)
def test_only_the_request_that_was_hit_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runner: str, layout: str, num_faults: int
) -> None:
    core = load(runner, layout)
    undisturbed = {name: token_ids(outputs) for name, outputs in run_all(core).items()}
    assert core.reset_prefix_cache() and core.stats().fused_copy_mismatches_total == 0
    broken = plant(monkeypatch, core, max_faults=num_faults)
    with caplog.at_level(logging.ERROR, logger="mambalign"):
        outputs = run_all(core)
    assert len(broken.blocks) == num_faults
    reasons = {name: [o.finish_reason for o in each if o.finish_reason] for name, each in outputs.items()}
    failed = [name for name, reason in reasons.items() if reason == ["error"]]
    assert len(failed) == num_faults and all(len(reason) == 1 for reason in reasons.values())
    for name, each in outputs.items():
        assert [o.finish_reason is None for o in each] == [True] * (len(each) - 1) + [False]  # nothing after the end
        if name in failed:
            assert "not copied right" in each[-1].error and not each[-1].new_token_ids
            assert token_ids(each) == undisturbed[name][: len(token_ids(each))]  # what it got before was right
        else:
            assert token_ids(each) == undisturbed[name] and len(undisturbed[name]) == NUM_TOKENS
    assert core.stats().fused_copy_mismatches_total == num_faults
    assert core.stats().kv_cache_usage == core.stats().mamba_cache_usage == 0
    assert len(caplog.records) == num_faults
    for name, record in zip(failed, caplog.records, strict=True):
        words = (f"request {name}:", "bytes differ", "expected PrecopyInfo(", "fused PrecopyInfo(", "table_row=")
        assert all(word in record.getMessage() for word in words)


def test_a_wrong_state_is_never_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed request's prompt again: its text is right, whatever it takes from the cache."""
    core = load("v2", "DS")
    undisturbed = {name: token_ids(outputs) for name, outputs in run_all(core).items()}
    assert core.reset_prefix_cache()
    broken = plant(monkeypatch, core)
    first = run_all(core)
    (failed,) = [name for name, each in first.items() if each[-1].finish_reason == "error"]
    assert broken.blocks and len(token_ids(first[failed])) > 0
    again = run_all(core)
    assert again[failed][-1].num_cached_tokens > 0
    assert {name: token_ids(outputs) for name, outputs in again.items()} == undisturbed


def test_a_late_mismatch_does_not_reach_the_next_request_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    core = load("v2", "DS")
    undisturbed = token_ids(run_all(core)["b"])
    broken = plant(monkeypatch, core, min_bias=0)
    add(core, "a", "a")
    while core.has_work() and not broken.blocks:
        core.step()
    assert any(row.request_id == "a" for scheduled, _ in core._launched for row in scheduled.rows)
    core.abort("a")
    add(core, "a", "b")
    outputs = run(core)["a"]
    assert [o.finish_reason for o in outputs if o.finish_reason] == ["abort", "length"]
    assert token_ids(outputs) == undisturbed and core.stats().fused_copy_mismatches_total == 1


def test_llm_raises() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        llm = LLM(spec_tokens=3, mamba_block_size=16, max_model_len=256, cache_memory=16 << 20, check_fused_copy=True)
        plant(monkeypatch, llm.core)
        with pytest.raises(RuntimeError, match="not copied right"):
            llm.generate(list(PROMPTS.values()), PARAMS)
        llm.core.check()
        assert [len(r.outputs[0].token_ids) for r in llm.generate(list(PROMPTS.values()), PARAMS)] == [NUM_TOKENS] * 3


def test_the_server_shows_it() -> None:
    options = ("--max-model-len", "256", "--cache-memory", "16MiB", "--spec-tokens", "3", "--mamba-block-size", "16")
    with ServerProcess(*options, "--check-fused-copy", program="broken_copy.py") as server:
        url = server.url
        assert call(f"{url}/health") == (200, {"status": "ok"})
        assert "mambalign:fused_copy_mismatches_total 0.0" in metrics_text(url)
        body = {"prompt": PROMPTS["a"], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        status, answer = call(f"{url}/v1/completions", body)
        assert status == 500 and "not copied right" in answer["error"]["message"]
        status, answer = call(f"{url}/health")
        assert status == 503 and answer["error"]["code"] == "fused_copy_mismatch"
        assert call(f"{url}/v1/completions", body)[1]["usage"]["completion_tokens"] == NUM_TOKENS
        text = metrics_text(url)
        assert "mambalign:fused_copy_mismatches_total 1.0" in text
        assert 'mambalign:fused_copy_checks_total{bias="0",layout="SD",runner="v2"}' in text
        assert 'mambalign:request_success_total{finished_reason="error"} 1.0' in text
        server.wait_line(r"fused copy check failed for request request-0-0: .*expected PrecopyInfo\(")
