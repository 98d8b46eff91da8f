"""The kernels of migration and of a step's numbers while serving: a server that runs them through Triton's interpreter.

The other suites of a machine without a GPU serve with each kernel's torch reference. Here one server a runner and
layout runs those kernels, with every copy checked against the scalar path, and its texts against the oracle.
"""

import openai
import pytest
from cells import LAYOUTS, RUNNERS
from oracle import Oracle
from server_process import ServerProcess

BLOCK_TOKENS, REPLY = 16, 40


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_texts_and_copies(runner: str, layout: str, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = {
        "runner": runner,
        "mamba-conv-layout": layout,
        "mamba-block-size": BLOCK_TOKENS,
        "spec-tokens": 3,
        "max-model-len": 256,
        "cache-memory": "64MiB",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    modules = {"bisect": BLOCK_TOKENS + 5, "heapq": 2 * BLOCK_TOKENS}
    prompts = [oracle.prompt(module, length, REPLY) for module, length in modules.items()]
    with ServerProcess(*arguments, "--check-fused-copy") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        for cached in ([0, 0], [BLOCK_TOKENS, BLOCK_TOKENS]):
            for prompt, expected in zip(prompts, cached, strict=True):
                answer = client.completions.create(
                    model="default",
                    prompt=prompt,
                    max_tokens=REPLY,
                    temperature=0,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                assert answer.usage.prompt_tokens_details.cached_tokens == expected
                oracle.assert_text(prompt, answer.choices[0].token_ids, None, f"{runner} {layout}")
        metrics = server.metrics()
        assert server.stop() == 0
    assert_copies_checked(metrics, runner, layout)


def assert_copies_checked(metrics: dict[str, float], runner: str, layout: str) -> None:
    def total(name: str, biases: range) -> float:
        labels = [f'bias="{bias}",layout="{layout}",runner="{runner}"' for bias in biases]
        return sum(metrics[f"{name}{{{label}}}"] for label in labels)

    assert total("fused_copy_checks_total", range(4)) > total("fused_copy_copies_total", range(4)) > 0
    assert total("fused_copy_copies_total", range(1, 4)) > 0  # after several accepted tokens
    assert metrics["fused_copy_mismatches_total"] == 0
