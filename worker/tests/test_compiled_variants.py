"""Every kernel is compiled once for its constants and dtypes, whatever numbers it is launched with.

Triton makes another binary for an integer that is 1 or a multiple of 16, or for a pointer off a 16-byte boundary; two
binaries may add in two orders.
"""

import importlib
import json
import pkgutil
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

import mambalign.kernels


def variants() -> dict[str, int]:
    """Kernel with its constants, options and dtypes -> binaries of it, of all kernels that this process has run."""
    counts: Counter[str] = Counter()
    for info in pkgutil.iter_modules(mambalign.kernels.__path__, "mambalign.kernels."):
        if info.name.endswith((".tests", ".cpu")):
            continue
        for kernel in vars(importlib.import_module(info.name)).values():
            if isinstance(kernel, JITFunction) and kernel.module == info.name:
                for device_cache in kernel.device_caches.values():
                    counts.update(f"{info.name}.{describe(kernel, each)}" for each in device_cache[0].values())
    return dict(counts)


def describe(kernel: JITFunction, binary: Any) -> str:
    source, constants, types = binary.src, {}, {}
    for parameter in kernel.params:
        if parameter.is_constexpr:
            constants[parameter.name] = str(source.constants[(parameter.num,)])
        elif source.signature[parameter.name] != "constexpr" and not source.signature[parameter.name].startswith("i"):
            types[parameter.name] = source.signature[parameter.name]  # an integer that is 1 has become a constant
    return f"{kernel.__name__} {constants} {types} {binary.metadata.num_warps} {binary.metadata.num_stages}"


def run_many_shapes() -> dict[str, int]:
    from mambalign.engine import LLM, SamplingParams

    for runner, layout, eager, prefill_scan, block_tokens in (
        ("v1", "DS", True, "recurrent", 16),
        ("v2", "SD", False, "recurrent", 16),
        ("v2", "SD", False, "chunked", 64),
    ):
        with LLM(
            device="cuda", runner=runner, mamba_conv_layout=layout, enforce_eager=eager, cache_memory=256 << 20,
            max_model_len=1024, mamba_block_size=block_tokens, max_num_seqs=17, max_num_batched_tokens=256,
            prefill_scan=prefill_scan,
        ) as llm:  # fmt: skip
            for num_prompts in (1, 2, 16, 17):
                prompts = [list(range(1 + i, 2 + 17 * i)) for i in range(num_prompts)]
                for params in ({"temperature": 0.0, "logprobs": 3}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}):
                    llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True, **params))
    return variants()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts compiled binaries")
def test_one_binary_a_kernel_and_set_of_constants() -> None:
    answer = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=500)
    assert answer.returncode == 0, answer.stderr[-3000:]
    counts = json.loads(answer.stdout.splitlines()[-1])
    assert len(counts) > 20
    assert {name: count for name, count in counts.items() if count > 1} == {}


if __name__ == "__main__":
    print(json.dumps(run_many_shapes()))
