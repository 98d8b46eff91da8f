"""The figures of a serving engine, measured by stepping it by hand: every step's time and what each row gained.

One engine per process. Each figure prints its ceiling (`step_model.py`) before the value and the spread over runs.
Prompts are random token ids, new ones in every run, so that nothing is cached unless a figure says so.
"""

import json
import random
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
from serving_trace import play_trace
from step_model import Machine, StepModel
from stepped_engine import SteppedEngine

from mambalign.engine import LLM
from mambalign.engine.bench_traffic import draw_talks

USERS_PER_S = 4.0  # new ones of the trace
# What the benchmark configurations must reach on an H200 with cache and three drafts: 80% of the ceiling, or less.
MUST = {
    "nemotron-h-8b-like": {
        "decode 1": 410,
        "decode 8": 2720,
        "decode 32": 7200,
        "decode 64": 8600,
        "prefill": 40_000,
        "ttft cold": 106.0,
        "ttft again": 15.0,
        "ttft next turn": 22.0,
    },
    "qwen3_5-9b-like": {
        "decode 1": 345,
        "decode 8": 2530,
        "decode 32": 7900,
        "decode 64": 10_800,
        "prefill": 36_000,
        "ttft cold": 110.0,
        "ttft again": 14.0,
    },
}
# Without drafts and cache: the decode rates of an existing engine.
MUST_PLAIN = {
    "nemotron-h-8b-like": {"decode 1": 217, "decode 8": 1555, "decode 32": 4800, "decode 64": 7498},
    "qwen3_5-9b-like": {"decode 1": 187, "decode 8": 1370, "decode 32": 4765, "decode 64": 8073},
}
MUST_DEVICE = "NVIDIA H200"


@dataclass
class Sizes:
    """Tokens and requests of each figure."""

    concurrency: list[int]
    prompt_tokens: int
    output_tokens: int
    prefill_tokens: int
    ttft_tokens: int
    users: int  # of the trace
    runs: int  # measured, after one that is not

    reply_tokens: int = 32  # of the turn before the next one
    next_turn_tokens: int = 256  # that a next turn adds
    turns: int = 3  # of each user of the trace

    @property
    def system_tokens(self) -> int:
        """The trace's shared beginning: 2,048 tokens beside time-to-first-token prompts of 4,096."""
        return self.ttft_tokens // 2

    @property
    def max_model_len(self) -> int:
        talk = self.system_tokens + self.ttft_tokens + self.turns * (self.ttft_tokens // 8 + self.output_tokens)
        decode = self.prompt_tokens + self.output_tokens
        ttft = self.ttft_tokens + self.reply_tokens + self.next_turn_tokens
        return max(talk, decode, ttft, self.prefill_tokens) + 8


class Bench:
    """An engine, its ceiling, and the figures measured on it, as numbers under `results`."""

    def __init__(self, llm: LLM, sizes: Sizes, machine: Machine, mean_kept: float | None, seed: int = 0):
        """mean_kept: tokens that synthetic acceptance keeps a step; None: as many as the drafts earn."""
        core = llm.core
        self.core, self.sizes, self.machine, self.mean_kept = core, sizes, machine, mean_kept
        self.engine = SteppedEngine(core, seed)
        dtype = getattr(torch, core.config.model.dtype)
        fp8_drafts = core.config.spec.draft_head_dtype == "fp8"
        self.model = StepModel.of(Path(core.facts.path), dtype, core.spec_tokens, fp8_drafts)
        self.results: dict[str, Any] = {}
        known = torch.cuda.is_available() and torch.cuda.get_device_name() == MUST_DEVICE
        self._must = (MUST if core.spec_tokens else MUST_PLAIN).get(core.facts.name, {}) if known else {}

    def decode(self) -> None:
        """Tokens a second: each row's tokens after its first, over the time from the last first token to the end."""
        sizes = self.sizes
        for rows in sizes.concurrency:
            rates, strict, before = [], [], self.core.stats()
            for run in range(sizes.runs + 1):
                prompts = [self.engine.prompt(sizes.prompt_tokens) for _ in range(rows)]
                timed = self.engine.run(prompts, sizes.output_tokens)
                start, end = max(t.first for t in timed), max(t.seen[-1][0] for t in timed)
                if run:
                    rates.append(rows * (sizes.output_tokens - 1) / (end - start))
                    strict.append(sum(n for t in timed for when, n in t.seen if when > start) / (end - start))
            seen = self._tokens_a_step(before)
            kept = self.mean_kept or seen
            step = self.model.decode_seconds(self.machine, rows, sizes.prompt_tokens + sizes.output_tokens // 2)
            self.report(f"decode {rows}", rates, rows * kept / step, "tok/s", tokens_a_step=round(seen, 3))
            self.results[f"decode {rows}"]["after_last_first_token"] = round(median(strict), 1)

    def _tokens_a_step(self, before) -> float:
        """Mean of tokens that a drafted row kept since `before`."""
        after = self.core.stats()
        drafted = after.spec_decode_num_drafts_total - before.spec_decode_num_drafts_total
        accepted = after.spec_decode_num_accepted_tokens_total - before.spec_decode_num_accepted_tokens_total
        return 1 + accepted / drafted if drafted else 1.0

    def prefill(self) -> None:
        """Tokens a second of one long prompt, up to its first token."""
        num_tokens = self.sizes.prefill_tokens
        times = [self.engine.run([self.engine.prompt(num_tokens)], 1)[0].ttft for _ in range(self.sizes.runs + 1)][1:]
        ceiling = num_tokens / self.model.prefill_seconds(self.machine, num_tokens)
        self.report("prefill", [num_tokens / seconds for seconds in times], ceiling, "tok/s", num_tokens=num_tokens)

    def ttft(self) -> None:
        """Milliseconds to the first token: a new prompt, the same again, and its next turn."""
        sizes = self.sizes
        kinds = ("ttft cold", "ttft again", "ttft next turn")
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for run in range(sizes.runs + 1):
            prompt = self.engine.prompt(sizes.ttft_tokens)
            cold = self.engine.run([prompt], sizes.reply_tokens)[0]
            again = self.engine.run([prompt], 1)[0]
            turn = self.engine.run([prompt + cold.token_ids + self.engine.prompt(sizes.next_turn_tokens)], 1)[0]
            if run:
                for kind, timed in zip(kinds, (cold, again, turn), strict=True):
                    times[kind].append(timed.ttft * 1000)
        for kind, timed in zip(kinds, (cold, again, turn), strict=True):
            num_new = len(timed.request.prompt_token_ids) - timed.num_cached_tokens
            least = self.model.prefill_seconds(self.machine, num_new, timed.num_cached_tokens)
            self.report(kind, times[kind], least * 1000, "ms", cached=timed.num_cached_tokens, new=num_new)

    def trace(self) -> None:
        """Users who talk in turns behind one system prompt; arrivals, lengths and pauses drawn from a seed."""
        sizes = self.sizes
        talks = draw_talks(
            random.Random(1),
            sizes.users,
            sizes.turns,
            rate=USERS_PER_S,
            message_tokens=sizes.ttft_tokens // 8,
            long_tokens=sizes.ttft_tokens,
            reply_tokens=sizes.output_tokens,
        )
        figures = play_trace(self.engine, talks, sizes.system_tokens)
        print("trace            " + ", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        self.results["trace"] = figures

    def memory(self) -> None:
        """Device memory in use now, pools and graphs and what the allocator keeps, beside the plan printed at start."""
        if not torch.cuda.is_available():
            print("memory           no CUDA device: nothing to compare", flush=True)
            return
        free, total = torch.cuda.mem_get_info()
        planned, used = sum(self.core.memory_plan.values()), total - free
        figures = {"plan": self.core.memory_plan, "planned": planned, "used": used}
        figures["peak_allocated"] = torch.cuda.max_memory_allocated()
        gib = f"in use {used / 2**30:.2f} GiB, allocated at most {figures['peak_allocated'] / 2**30:.2f} GiB"
        if planned:
            figures["used_over_plan"] = round(used / planned, 4)
            gib = f"plan {planned / 2**30:.2f} GiB, {gib}, {used / planned:.1%} of the plan"
        print(f"memory           {gib}", flush=True)
        self.results["memory"] = figures

    def report(self, name: str, values: Iterable[float], ceiling: float, unit: str, **facts: Any) -> None:
        """Ceiling first, then the value and how near it comes (for times: ceiling over value), then the spread."""
        values = list(values)
        middle, is_time = median(values), unit == "ms"
        ratio = ceiling / middle if is_time else middle / ceiling
        line = f"{name:16} ceiling {ceiling:10.1f} {unit}: {middle:10.1f}  {ratio:6.1%}  "
        line += f"({min(values):.1f} to {max(values):.1f}, {len(values)} runs)"
        result = {"ceiling": round(ceiling, 2), "median": round(middle, 2), "of_ceiling": round(ratio, 4)}
        result |= {"min": round(min(values), 2), "max": round(max(values), 2), "unit": unit, **facts}
        if name in self._must:
            must = self._must[name]
            met = middle <= must if is_time else middle >= must
            line += f"  must {must}: {'met' if met else 'MISSED'}"
            result |= {"must": must, "met": met}
        print(line + "".join(f", {key} {value}" for key, value in facts.items()), flush=True)
        self.results[name] = result


def engine_options(args: Namespace, is_plain: bool) -> dict[str, Any]:
    """As `LLM` takes them."""
    options: dict[str, Any] = {
        "load_format": args.load_format,
        "max_num_seqs": max(*args.concurrency, min(args.users, 64)),
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }
    if is_plain:
        options |= {"spec_tokens": 0, "mamba_cache_mode": "none"}
    else:
        options |= {"spec_tokens": args.spec_tokens[0], "spec_acceptance": args.spec_acceptance}
    for setting in args.engine:
        name, _, value = setting.partition("=")
        try:
            options[name.replace("-", "_")] = json.loads(value.lower())
        except ValueError:
            options[name.replace("-", "_")] = value
    return options


def measure_figures(args: Namespace) -> dict[str, Any]:
    """One engine from its start, and the figures asked for."""
    job = json.loads(args.job)
    sizes = Sizes(**{f.name: getattr(args, f.name) for f in fields(Sizes) if hasattr(args, f.name)})
    options = engine_options(args, job["is_plain"])
    longest = {"max_model_len": sizes.max_model_len} | options
    llm = LLM(args.model, **longest)
    ready = time.time() - job["started_at"]
    machine = Machine(job["machine"]["bytes_per_s"], job["machine"]["flops_per_s"])
    bench = Bench(llm, sizes, machine, None if job["is_plain"] else args.spec_acceptance)
    first = bench.engine.run([bench.engine.prompt(100)], 8)[0]
    bench.results["start"] = {"ready_s": round(ready, 2), "first_token_ms": round(first.ttft * 1000, 1)}
    print(f"start            ready after {ready:.1f} s, first token {first.ttft * 1000:.0f} ms later", flush=True)
    for line in llm.core.plan:
        print(f"                 {line}", flush=True)
    for figure in job["figures"]:
        if figure != "start":
            getattr(bench, figure)()
    return bench.results
