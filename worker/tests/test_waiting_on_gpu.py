"""V2 launches its steps without waiting for the device, however the next token is taken."""

import pytest
import torch

from mambalign.engine import LLM, SamplingParams

ASKS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 2, "logprobs": 2},
    {"temperature": 0.7, "logit_bias": {5: 3.0, 9: -100.0}, "min_tokens": 30, "seed": 3},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 4},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spec_method", ["mtp", "ngram"])
def test_no_step_waits_for_the_device(spec_method: str) -> None:
    llm = LLM(device="cuda", spec_method=spec_method, cache_memory=256 << 20, max_model_len=512, mamba_block_size=16)
    execute, num_steps = llm.core.runner.execute_model, 0

    def watched(scheduled):
        nonlocal num_steps
        num_steps += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(scheduled)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    prompts = [list(range(10 + i, 60 + 7 * i)) for i in range(len(ASKS))]
    params = [SamplingParams(max_tokens=60, ignore_eos=True, **ask) for ask in ASKS]
    llm.generate(prompts, params)  # compiles kernels
    llm.core.runner.execute_model = watched
    results = llm.generate(prompts, params)
    assert num_steps > 30 and all(len(result.outputs[0].token_ids) == 60 for result in results)
    llm.shutdown()
