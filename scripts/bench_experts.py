#!/usr/bin/env python3
"""How fast a mixture of experts is on a CUDA device: each of its launches alone in a graph, and its products' limit.

Tokens choose experts at random. The limit is the bytes of the experts that some token chose at the measured copy rate,
or the operations at 790 TFLOP/s. `--tiles` also tries other tiles for the products. Ends in one JSON line.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from device_times import compile_all, graph_times
from machine_rates import copy_rate

from mambalign.kernels.combine_experts import combine_experts
from mambalign.kernels.expert_routing import Routing, route_experts, sort_by_expert
from mambalign.kernels.grouped_linear import Tiles, grouped_linear_on_gpu, tiles_for

DEVICE, TFLOPS = "cuda", 790.0
CALLS = 4  # in a graph, of other tokens each
TOKENS = (4, 32, 128, 256, 512, 1024, 2048, 4096, 8192)
CANDIDATES = (
    *(Tiles(16, *rest) for rest in ((64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3))),
    *(Tiles(32, *rest) for rest in ((128, 64, 4, 4), (128, 128, 4, 3), (256, 64, 8, 3))),
    *(Tiles(64, *rest) for rest in ((128, 64, 4, 4), (128, 64, 8, 4), (256, 64, 8, 3))),
    *(Tiles(128, *rest) for rest in ((128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 5), (256, 64, 8, 3))),
)


@dataclass(frozen=True)
class Mixture:
    """The sizes of a published model's layer."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    gated: bool


MODELS = {
    "Nemotron 3 30B-A3B": Mixture(128, 6, 2688, 1856, gated=False),
    "Qwen3.5 35B-A3B": Mixture(256, 8, 2048, 512, gated=True),
}


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) / 64


class Layer:
    """Weights of one mixture, and the launches that it makes for `CALLS` batches of some tokens."""

    def __init__(self, mixture: Mixture):
        self.mixture = mixture
        self.up = half(mixture.num_experts, mixture.hidden, mixture.inner * (2 if mixture.gated else 1))
        self.down = half(mixture.num_experts, mixture.inner, mixture.hidden)
        self.routing = Routing(mixture.num_experts, mixture.top_k, sigmoid=not mixture.gated, normalised=True)

    def take(self, num_tokens: int) -> None:
        """Tokens of each call, and what the launches before each launch leave."""
        pairs = num_tokens * self.mixture.top_k
        self.x = [half(num_tokens, self.mixture.hidden) for _ in range(CALLS)]
        self.logits = [torch.randn(num_tokens, self.mixture.num_experts, device=DEVICE) for _ in range(CALLS)]
        self.chosen = [route_experts(logits, None, self.routing) for logits in self.logits]
        self.sorted = [sort_by_expert(ids, self.mixture.num_experts) for ids, _ in self.chosen]
        self.inner = [half(pairs, self.mixture.inner) for _ in range(CALLS)]
        self.y = [half(pairs, self.mixture.hidden) for _ in range(CALLS)]

    def product(self, is_up: bool, call: int, tiles: Tiles | None = None) -> torch.Tensor:
        order, first = self.sorted[call]
        if is_up:
            activation = None if self.mixture.gated else "relu2"
            rest = (self.mixture.top_k, True, activation, self.mixture.gated, tiles)
            return grouped_linear_on_gpu(self.x[call], self.up, order, first, *rest)
        return grouped_linear_on_gpu(self.inner[call], self.down, order, first, self.mixture.top_k, False, tiles=tiles)

    def launches(self) -> dict[str, list[Callable[[], object]]]:
        calls = range(CALLS)
        return {
            "route": [partial(route_experts, self.logits[i], None, self.routing) for i in calls],
            "sort": [partial(sort_by_expert, self.chosen[i][0], self.mixture.num_experts) for i in calls],
            "up": [partial(self.product, True, i) for i in calls],
            "down": [partial(self.product, False, i) for i in calls],
            "combine": [partial(combine_experts, self.y[i], self.chosen[i][1]) for i in calls],
        }

    def limit_us(self, is_up: bool, num_tokens: int, bytes_per_us: float) -> float:
        weight = (self.up if is_up else self.down)[0]
        chosen = sum(len(ids.unique()) for ids, _ in self.chosen) / CALLS
        flops = 2 * num_tokens * self.mixture.top_k * weight.numel()
        return max(chosen * weight.nbytes / bytes_per_us, flops / (TFLOPS * 1e6))

    def own_tiles(self, is_up: bool, num_tokens: int) -> Tiles:
        weight, gated = (self.up, self.mixture.gated) if is_up else (self.down, False)
        n = weight.shape[2] // 2 if gated else weight.shape[2]
        pairs = num_tokens * self.mixture.top_k
        return tiles_for(pairs, self.mixture.num_experts, weight.shape[1], n, weight.dtype, gated)


def try_tiles(layer: Layer, is_up: bool, own: Tiles, replays: int) -> list[tuple[float, Tiles]]:
    """Microseconds with each candidate, the fastest first. Raises RuntimeError for one that gives other bits."""
    tiles = list(dict.fromkeys((own, *CANDIDATES)))
    calls = {each: [partial(layer.product, is_up, i, each) for i in range(CALLS)] for each in tiles}
    compile_all(calls[each][0] for each in tiles)
    want, times = layer.product(is_up, 0, own), []
    for each in tiles:
        try:
            got = calls[each][0]()
            times.append((median(graph_times(calls[each], replays)), each))
        except Exception as error:  # too much shared memory, or too many registers
            print(f"  {tuple(each)}: {str(error).splitlines()[0][:80]}")
            continue
        if not torch.equal(got, want):
            raise RuntimeError(f"tiles {each} give other bits than {own}")
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=5, help="graph replays, of which the median counts")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="numbers of tokens")
    parser.add_argument("--tiles", action="store_true", help="try other tiles too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the times would say nothing")
    torch.manual_seed(0)
    rate, results = copy_rate(), []
    print(f"{torch.cuda.get_device_name()}: copies at {rate:.2f} TB/s, read plus written; {TFLOPS:.0f} TFLOP/s")
    for name, mixture in MODELS.items():
        layer = Layer(mixture)
        for tokens in options.tokens:
            layer.take(tokens)
            for launch, calls in layer.launches().items():
                times = graph_times(calls, options.replays)
                result = {"model": name, "tokens": tokens, "launch": launch, "us": round(median(times), 1)}
                said = f"{name:18} {tokens:5} tokens {launch:8} {median(times):8.1f} us"
                said += f" [{min(times):.1f} .. {max(times):.1f}]"
                if launch in ("up", "down"):
                    limit, own = (
                        layer.limit_us(launch == "up", tokens, rate * 1e6),
                        layer.own_tiles(launch == "up", tokens),
                    )
                    result |= {"limit_us": round(limit, 1), "tiles": own}
                    said += f", limit {limit:7.1f}, {median(times) / limit:.2f} of it, tiles {tuple(own)}"
                print(said, flush=True)
                if launch in ("up", "down") and options.tiles:
                    tried = try_tiles(layer, launch == "up", own, options.replays)
                    print("  best:", *(f"{us:.1f} us {tuple(each)};" for us, each in tried[:3]), flush=True)
                    result["best"] = tried[:3]
                results.append(result)
        del layer
    print(json.dumps({"device": torch.cuda.get_device_name(), "copy_tb_s": rate, "results": results}))


if __name__ == "__main__":
    main()
