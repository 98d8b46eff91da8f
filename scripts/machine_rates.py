"""What this machine could do: the rates that the ceilings of a benchmark are made of."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from device_times import event_times


def copy_rate(num_bytes: int = 4 << 30) -> float:
    """TB/s of a GPU's large copy, read plus write; not in a graph, where it would become a copy engine's work."""
    source, dest = torch.empty(2, num_bytes // 4, dtype=torch.int32, device="cuda").unbind()
    source.random_()
    return 2 * num_bytes / statistics.median(event_times(lambda: dest.copy_(source), 15)) / 1e6


def measure_rates() -> dict[str, float]:
    """What this CPU could do: fp32 GEMM rate and copy bandwidth."""

    def best_seconds(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(8):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source = torch.randn(2**25)  # 128 MiB: beyond the caches
    target = torch.empty_like(source)
    return {
        "gemm_gflops": 2 * 1024**3 / best_seconds(lambda: torch.mm(a, b)) / 1e9,
        "copy_gb_per_s": 2 * source.numel() * 4 / best_seconds(lambda: target.copy_(source)) / 1e9,
    }


def measure_ceiling(args: argparse.Namespace) -> dict[str, Any]:
    """What the machine could do, and the tokens a second it allows."""
    from safetensors import safe_open  # only here: the figures of random weights need none

    from mambalign.engine.checkpoint import locate

    num_params = 0  # that a token passes: without drafter, and the embedding is looked up (but may be the head)
    for file in locate(args.model).glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            names = [name for name in weights.keys() if not name.startswith("mtp.")]
            skipped = "embed" if any("lm_head" in name for name in names) else None
            for name in names:
                if skipped is None or skipped not in name:
                    num_params += torch.Size(weights.get_slice(name).get_shape()).numel()
    rates = measure_rates()
    # A prompt token and an output token each pass every weight once; attention and scan are left out.
    tokens_per_output = 1 + args.prompt_tokens / args.output_tokens
    return rates | {
        "num_params": num_params,
        "output_tokens_per_s": rates["gemm_gflops"] * 1e9 / (2 * num_params * tokens_per_output),
    }


def measure_machine(args: argparse.Namespace) -> dict[str, Any]:
    """Copy rate, and the matmul rate: given for a GPU, measured in fp32 on a CPU."""
    if torch.cuda.is_available():
        name, copy, flops = torch.cuda.get_device_name(), copy_rate() * 1e12, args.peak_tflops * 1e12
    else:
        ceiling = measure_rates()
        name, copy, flops = "cpu", ceiling["copy_gb_per_s"] * 1e9, ceiling["gemm_gflops"] * 1e9
    return {"device": name, "bytes_per_s": copy, "flops_per_s": flops, "torch": torch.__version__}
