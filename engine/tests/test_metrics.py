"""Metrics under the names that dashboards ask for, and what each tells of requests whose fate is known."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, call

from mambalign.engine import LLM, SamplingParams
from mambalign.engine.checkpoint import DEFAULT_MODEL
from mambalign.engine.prefix_cache import MISS_CAUSES
from mambalign.engine.server.metric_names import DASHBOARD_NAMES, OLD_NAMES, PREFIX, WITHOUT_MEANING
from mambalign.engine.server.metrics import BLOCK_STATES, Metrics


def test_every_dashboard_name_is_there_from_the_start() -> None:
    metrics = Metrics()
    metrics.engine.num_positions = 3
    samples = [s for f in text_string_to_metric_families(metrics.text('a "model"').decode()) for s in f.samples]
    names = {s.name for s in samples}
    for name in {*DASHBOARD_NAMES, *OLD_NAMES}:
        assert {PREFIX + name, f"{PREFIX}{name}_bucket"} & names, name
    assert not {PREFIX + name for name in WITHOUT_MEANING} & names
    assert all(s.labels["model_name"] == 'a "model"' and s.value == 0 for s in samples)
    assert len({(s.name, *sorted(s.labels.items())) for s in samples}) == len(samples)
    labels = {(s.name.removeprefix(PREFIX), k, v) for s in samples for k, v in s.labels.items()}
    assert {("spec_decode_num_accepted_tokens_per_pos_total", "position", str(i)) for i in range(3)} <= labels
    assert {("prefix_cache_misses_total", "cause", cause) for cause in MISS_CAUSES} <= labels
    assert {("mamba_cache_blocks", "state", state) for state in BLOCK_STATES} <= labels


def test_times_and_sizes_of_requests(fake_model: Path) -> None:
    with ServerProcess(fake_model, program="fake_core.py") as server:
        body = {"prompt": ["abc", "<slow>"], "max_tokens": 5, "n": 2}
        assert call(f"{server.url}/v1/completions", body)[0] == 200
        metrics = server.metrics()
    for name, count, total in [
        ("request_prompt_tokens", 4, 8),
        ("request_generation_tokens", 4, 20),
        ("request_params_n", 2, 4),
        ("request_params_max_tokens", 2, 10),
        ("request_max_num_generation_tokens", 1, 5),
    ]:
        assert (metrics[f"{name}_count"], metrics[f"{name}_sum"]) == (count, total), name
    parts = [metrics[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode")]
    assert all(metrics[f"request_{part}_time_seconds_count"] == 4 for part in ("queue", "prefill", "decode"))
    assert sum(parts) == pytest.approx(metrics["e2e_request_latency_seconds_sum"]) and parts[2] > 0
    assert metrics["request_inference_time_seconds_sum"] == pytest.approx(parts[1] + parts[2])
    assert metrics["request_time_per_output_token_seconds_sum"] == pytest.approx(parts[2] / 4)
    for old, new in OLD_NAMES.items():
        kind = "_sum" if new.endswith("seconds") else ""
        assert metrics[old + kind] == metrics[new + kind]


@pytest.mark.skipif(not (DEFAULT_MODEL / "config.json").exists(), reason="no model ships here")
def test_misses_by_cause_and_blocks_by_state() -> None:
    llm = LLM(
        spec_tokens=0, mamba_block_size=16, kv_block_size=8, max_model_len=256, cache_memory="14MiB", max_num_seqs=2
    )
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    misses: dict[str, int] = {}

    def ask(ids: list[int], cause: str | None, **more: int) -> None:
        llm.generate(ids, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, **more))
        if cause is not None:
            misses[cause] = misses.get(cause, 0) + 1
        assert llm.core.stats().prefix_cache_misses == misses

    text = [40 + i for i in range(100)]
    ask(text[:16], "too_short")
    ask([5, *text[:16]], "unseen")
    ask(text[:17], None)  # the state after 16 tokens was kept all the same
    ask(text, None)
    ask([7, *text], "unseen")
    ask([7, *text[:31]], "no_state")  # kept: after 80 and 96, at the end
    ask([7, *text[:31]], None)  # the junction
    ask(text, "disabled", prompt_logprobs=0)
    blocks = llm.core.stats().mamba_cache_blocks
    assert blocks["held"] == 0 and blocks["cached"] >= 3
    assert sum(blocks.values()) == llm.core.scheduler.blocks.mamba_pool.num_usable
    llm.generate([[start + i for i in range(250)] for start in range(500, 550)], params)
    misses = dict(llm.core.stats().prefix_cache_misses)
    assert llm.core.stats().kv_cache_blocks["free"] < 32
    ask(text, "evicted")
    llm.core.reset_prefix_cache()
    ask(text, "unseen")
    off = LLM(spec_tokens=0, enable_prefix_caching=False, max_model_len=256, cache_memory="14MiB")
    off.generate(text, params)
    assert off.core.stats().prefix_cache_misses == {"disabled": 1}
