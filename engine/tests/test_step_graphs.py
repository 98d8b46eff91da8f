"""Padded decode steps: rows copied into a graph's tensors give the bits of the step itself, padding touches nothing."""

from dataclasses import replace

import pytest

from mambalign.engine import LLM, SamplingParams
from mambalign.engine.engine_plan import EnginePlan
from mambalign.worker.step_graphs import graph_sizes

PROMPTS = [
    "def fib(n):\n    if n < 2:\n        return n\n",
    "import os\n\ndef main():\n    for i in range(10):\n        print(i)\n" * 4,
    "class A:\n",
]
GREEDY = SamplingParams(max_tokens=34, temperature=0.0, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(max_tokens=21, temperature=0.8, top_p=0.9, seed=5, frequency_penalty=0.3, ignore_eos=True)


def generate(**options) -> tuple[list, LLM]:
    options |= dict(mamba_block_size=16, max_num_batched_tokens=64, cache_memory="48MiB", max_model_len=512)
    llm = LLM(max_num_seqs=3, **options)
    outputs = llm.generate(PROMPTS, [GREEDY, GREEDY, SAMPLED])
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs], llm


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize(("spec_tokens", "method"), [(3, "mtp"), (0, None), (2, "ngram")])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_padded_steps_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, runner: str, spec_tokens: int, method: str | None, layout: str
) -> None:
    options = dict(runner=runner, spec_tokens=spec_tokens, spec_method=method, mamba_conv_layout=layout)
    want, _ = generate(**options)
    limits = EnginePlan._runner_limits
    monkeypatch.setattr(EnginePlan, "_runner_limits", lambda plan, n: replace(limits(plan, n), step_graphs=True))
    got, llm = generate(**options)
    assert got == want
    graphs = llm.core.runner.step.graphs
    assert graphs.num_steps > 10
    for pool in (*llm.core.runner.cache.temporal, *llm.core.runner.cache.conv):
        assert not pool[0].any(), "padding wrote into the null block"


def test_sizes_end_with_the_most_rows() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(64)[-2:] == [48, 64]
    assert graph_sizes(1000)[-1] == 256 and len(graph_sizes(1000)) == 15


def serve_one_by_one(**options) -> tuple[list, LLM]:
    """Prompts alone: cold, longer than a step, again, and with a few tokens more."""
    options |= dict(max_num_batched_tokens=128, mamba_block_size=32, cache_memory="48MiB", max_model_len=512)
    llm = LLM(max_num_seqs=2, **options)
    short, long = list(range(5, 75)), list(range(9, 309))
    prompts = [short, long, long, long + short[:7], short, [7]]
    outputs = [llm.generate([prompt], GREEDY)[0].outputs[0] for prompt in prompts]
    return [(output.token_ids, output.logprobs) for output in outputs], llm


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize(
    "options",
    [
        dict(spec_tokens=3, spec_method="mtp"),
        dict(spec_tokens=3, spec_method="mtp", prefill_scan="chunked"),
        dict(spec_tokens=2, spec_method="ngram", runner="v1"),
        dict(spec_tokens=3, spec_method="mtp", runner="v1"),
    ],
)
def test_prompts_in_graphs_have_the_bits_of_prompts_without(
    monkeypatch: pytest.MonkeyPatch, options: dict, layout: str
) -> None:
    want, _ = serve_one_by_one(mamba_conv_layout=layout, **options)
    limits = EnginePlan._runner_limits
    monkeypatch.setattr(EnginePlan, "_runner_limits", lambda plan, n: replace(limits(plan, n), step_graphs=True))
    got, llm = serve_one_by_one(mamba_conv_layout=layout, **options)
    assert got == want
    stats, graphs = llm.core.stats(), llm.core.runner.step.graphs
    assert graphs.num_prompt_steps == 6 and stats.prefix_cache_hits_total > 0
    assert graphs.num_steps > 6 + 6 * 34 / 4
    for pool in (*llm.core.runner.cache.temporal, *llm.core.runner.cache.conv):
        assert not pool[0].any(), "padding wrote into the null block"


def test_no_graph_is_for_prompts_beside_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = EnginePlan._runner_limits
    monkeypatch.setattr(EnginePlan, "_runner_limits", lambda plan, n: replace(limits(plan, n), step_graphs=True))
    llm = LLM(max_num_seqs=2, spec_tokens=0, cache_memory="48MiB", max_model_len=512)
    llm.generate(PROMPTS[:2], SamplingParams(max_tokens=1, temperature=0.0))
    assert llm.core.runner.step.graphs.num_steps == 0
