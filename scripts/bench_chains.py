#!/usr/bin/env python3
"""How fast the linear layers of a model are one after another, as in a step: chains of layers in a CUDA graph.

A layer here is norm, product, gate, product, twice over; its time covers launches and what kernels hide of each other,
which single calls do not show. The limit is the weights' bytes at the measured copy rate, or the operations at
790 TFLOP/s. `--tiles` also tries other tiles for each line of the kernel's tables, the library left out of what they
serve. Ends in one JSON line. Needs a CUDA device.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median

import torch
from device_times import compile_all, graph_times
from machine_rates import copy_rate

from mambalign.kernels import linear as library
from mambalign.kernels import linear_tiles
from mambalign.kernels.gate_mul import gate_mul
from mambalign.kernels.linear import check_linear_invariance, linear, linear_for_sum
from mambalign.kernels.linear_tiles import Tiles, kind_of
from mambalign.kernels.linear_triton import linear_on_gpu
from mambalign.kernels.rms_norm import add_rms_norm

DEVICE, HIDDEN, TFLOPS = "cuda", 4096, 790.0
LAYERS = 6  # of a chain, of weights of their own: more than the L2 cache holds
ROWS = (1, 4, 16, 32, 64, 96, 128, 192, 256, 2048, 8192)
TABLE_ROWS = (16, 32, 64, 128, 256)
MOST_SHARED = 225_000  # bytes of a multiprocessor that a program may take
MODELS = {  # the four products of a layer: (K, N) each
    "8B Nemotron-H": ((HIDDEN, 18560), (8192, HIDDEN), (HIDDEN, 21504), (21504, HIDDEN)),
    "9B Qwen3.5": ((HIDDEN, 12352), (HIDDEN, HIDDEN), (HIDDEN, 24576), (12288, HIDDEN)),
}


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) / 64


@dataclass
class Chain:
    """Layers of one model."""

    name: str
    weights: list[list[torch.Tensor]]
    norm: torch.Tensor

    @classmethod
    def of(cls, name: str) -> "Chain":
        weights = [[half(*shape) for shape in MODELS[name]] for _ in range(LAYERS)]
        check_linear_invariance(weights[0])
        return cls(name, weights, torch.ones(HIDDEN, device=DEVICE))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, hidden]. Between two products a gate: the first columns that the next one takes times the last ones."""
        residual = x
        for first, second, third, fourth in self.weights:
            for wide, back in ((first, second), (third, fourth)):
                x, residual = add_rms_norm(x, residual, self.norm, 1e-5)
                if wide.shape[1] == len(back):
                    x = linear_for_sum(linear(x, wide, activation="relu2"), back)
                else:
                    y = linear(x, wide)
                    x = linear_for_sum(gate_mul(y[:, : len(back)], y[:, -len(back) :]), back)
        return x

    def layer_us(self, num_rows: int, replays: int) -> list[float]:
        """Microseconds a layer, one number a replay."""
        return [us / LAYERS for us in graph_times([partial(self.run, half(num_rows, HIDDEN))], replays)]

    def limit_us(self, num_rows: int, bytes_per_us: float) -> float:
        elements = sum(weight.numel() for weight in self.weights[0])
        return max(2 * elements / bytes_per_us, 2 * num_rows * elements / (TFLOPS * 1e6))


def candidates(most_rows: int) -> Iterator[Tiles]:
    """Tiles worth a try for so many rows, fetched by the copy engine: few deep ones, and many that share the room."""
    for block_m in (min(most_rows, 64), 128, 256):
        for block_n, block_k, num_warps in product((64, 128, 256), (64, 128), (4, 8)):
            stage_bytes = 2 * block_k * (block_m + block_n)
            for num_stages in (3, 4, 5, 6, 8):
                if block_m <= most_rows and 48 << 10 <= num_stages * stage_bytes <= MOST_SHARED:
                    yield Tiles(block_m, block_n, block_k, num_warps, num_stages, tma=True)


def try_tiles(chain: Chain, replays: int) -> list[dict]:
    """A layer's time with each candidate in a line of the tables, the line's own tiles first."""
    by_kind: dict[str, list[torch.Tensor]] = {}
    for weight in chain.weights[0]:
        by_kind.setdefault(kind_of(*weight.shape), []).append(weight)
    known, results = dict(library._library_rows), []
    for rows, (kind, weights) in product(TABLE_ROWS, by_kind.items()):
        table = linear_tiles._TILES[2, kind]
        place, before = [most for most, _ in table].index(rows), list(table)
        own = before[place][1]
        tiles = list(dict.fromkeys([own, *(each._replace(split=own.split) for each in candidates(rows))]))
        compile_all(
            partial(linear_on_gpu, half(rows, len(weight)), weight, tiles=each) for each in tiles for weight in weights
        )
        for shape, out_dtype in known:
            if kind_of(*shape[:2]) == kind:
                library._library_rows[shape, out_dtype] = set()
        for each in tiles:
            table[place] = (rows, each)
            try:
                us = median(chain.layer_us(rows, replays))
            except Exception as error:  # too much shared memory, or too many registers
                print(f"  {tuple(each)}: {str(error).splitlines()[0][:80]}")
                continue
            print(f"{chain.name:14} {rows:4} rows {kind:8} {tuple(each)} {us:8.1f} us", flush=True)
            results.append({"model": chain.name, "rows": rows, "kind": kind, "tiles": each, "us": us})
        table[:] = before
        library._library_rows.update(known)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=9, help="graph replays, of which the median counts")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="numbers of rows")
    parser.add_argument("--tiles", action="store_true", help="try other tiles too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the times would say nothing")
    torch.manual_seed(0)
    rate, results, tried = copy_rate(), [], []
    print(f"{torch.cuda.get_device_name()}: copies at {rate:.2f} TB/s, read plus written; {TFLOPS:.0f} TFLOP/s")
    for name in MODELS:
        chain = Chain.of(name)
        for rows in options.rows:
            times, limit = chain.layer_us(rows, options.replays), chain.limit_us(rows, rate * 1e6)
            us = median(times)
            spread = f"[{min(times):.1f} .. {max(times):.1f}]"
            print(f"{name:14} {rows:5} rows {us:8.1f} us a layer {spread}, limit {limit:7.1f}, {us / limit:.2f} of it")
            results.append({"model": name, "rows": rows, "us": round(us, 1), "limit_us": round(limit, 1)})
        tried += try_tiles(chain, options.replays) if options.tiles else []
        del chain
    print(json.dumps({"device": torch.cuda.get_device_name(), "copy_tb_s": rate, "results": results, "tiles": tried}))


if __name__ == "__main__":
    main()
