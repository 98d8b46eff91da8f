"""Log-probabilities of prompts: the bits that generating the same tokens gives, however the prompt is cut."""

import pytest

from mambalign.engine import LLM, SamplingParams
from mambalign.engine.checkpoint import DEFAULT_MODEL

pytestmark = pytest.mark.skipif(not (DEFAULT_MODEL / "config.json").exists(), reason="no model ships here")
PROMPT = "def fib(n):\n    if n < 2:\n        return n\n"
SMALL = dict(mamba_block_size=16, cache_memory="48MiB", max_model_len=512)


@pytest.fixture(scope="module")
def written() -> tuple[list[int], int, list]:
    """A text's ids, where its prompt ends, and the log-probabilities of the generated tokens."""
    llm = LLM(runner="v1", spec_tokens=0, **SMALL)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=3)
    (result,) = llm.generate(PROMPT, params)
    output = result.outputs[0]
    return result.prompt_token_ids + output.token_ids, len(result.prompt_token_ids), output.logprobs


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(("spec_tokens", "budget"), [(0, 2048), (3, 13)])
def test_equal_to_those_of_generating(written: tuple, runner: str, spec_tokens: int, budget: int) -> None:
    ids, split, of_output = written
    llm = LLM(runner=runner, spec_tokens=spec_tokens, max_num_batched_tokens=budget, max_num_seqs=4, **SMALL)
    plain = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    asking = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, prompt_logprobs=3)
    llm.generate(ids, plain)  # now most of the prompt is cached
    first, beside, other = llm.generate([ids, PROMPT, ids[:50]], [asking, plain, asking])
    assert first.num_cached_tokens == other.num_cached_tokens == 0
    assert len(first.prompt_logprobs) == len(ids) - 1 and first.prompt_logprobs[split - 1 :] == of_output
    assert other.prompt_logprobs == first.prompt_logprobs[:49] and beside.prompt_logprobs is None
    again = llm.generate(ids[:1] + ids, asking)[0]
    assert again.num_cached_tokens == 0
    found = llm.generate(ids[:1] + ids, plain)[0]
    assert found.num_cached_tokens == len(ids) // 16 * 16, "published all the same"
    assert found.outputs[0].token_ids == again.outputs[0].token_ids
    llm.core.check()


def test_preempted_requests_tell_each_token_once() -> None:
    """Pools so small that long texts push one another out."""
    llm = LLM(spec_tokens=0, max_num_seqs=4, max_num_batched_tokens=24, **SMALL | {"cache_memory": "14MiB"})
    prompts = [[i + 5, *range(20, 120)] for i in range(4)]
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True, prompt_logprobs=1)
    results = llm.generate(prompts, params)
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    assert [r.prompt_logprobs for r in results] == [r.prompt_logprobs for r in alone]
    assert [r.outputs[0].token_ids for r in results] == [r.outputs[0].token_ids for r in alone]
    assert llm.core.stats().num_preemptions_total > 0
