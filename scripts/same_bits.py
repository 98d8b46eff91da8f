#!/usr/bin/env python3
"""The same request, the same bits: every cell of the matrix against the request alone, cold, without drafts, eager.

    {cold, warm} x {alone, 8, 33 requests} x {S 0, 1, 3} x {V1, V2} x {SD, DS} x {graphs, eager}
    x {prefill budget 256, 2048, 8192}

Token ids and the log-probabilities of the best five must be equal bit for bit, for every request of a cell and not
only for one of them. An engine runs all its cells: cold, then the same requests warm, then once more without
log-probabilities (tokens alone, so that V2 runs ahead of its results). Engines are a pairwise cover of the last five
dimensions, which makes it one of all seven; `--full` is the whole product, `--shard i/n` a part of it.

One process; a line a cell, the first difference in full, one JSON line at the end; exit code 1 if a cell differs.
On a CPU the sizes are small and nothing is captured.
"""

import argparse
import functools
import itertools
import json
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from offline_rates import make_prompts

import mambalign.engine.core
from mambalign.engine import LLM, SamplingParams
from mambalign.engine.checkpoint import locate
from mambalign.engine.llm import CompletionOutput, RequestOutput

BLOCK_TOKENS = 128  # B
MOST_ENGINES = 16  # of a cover
COMPANY = (1, 8, 33)
ON_CUDA = torch.cuda.is_available()
BENCH_MODELS = Path(__file__).parent / "bench_models"
MODELS = {
    "default": None,
    "1b": str(BENCH_MODELS / "nemotron-h-1b-like"),
    "qwen-1b": str(BENCH_MODELS / "qwen3_5-1b-like"),
}


@dataclass(frozen=True)
class Engine:
    """One engine's options; the cells are what is run in it."""

    spec_tokens: int
    runner: str
    layout: str
    launch: str  # "eager" or "graphs"
    budget: int  # tokens of a step

    @property
    def name(self) -> str:
        return f"S{self.spec_tokens} {self.runner} {self.layout} {self.launch} budget {self.budget}"

    def open(self, model: str | None, load_format: str, max_model_len: int, prefill_scan: str) -> LLM:
        return LLM(
            model,
            load_format=load_format,
            spec_tokens=self.spec_tokens,
            runner=self.runner,
            mamba_conv_layout=self.layout,
            enforce_eager=self.launch == "eager",
            max_num_batched_tokens=self.budget,
            max_num_seqs=max(COMPANY),
            max_model_len=max_model_len,
            mamba_block_size=BLOCK_TOKENS,
            cache_memory="16GiB" if ON_CUDA else "1GiB",
            prefill_scan=prefill_scan,
        )


# The first value of each is the baseline's; its prompts are not cut, so its budget is the largest.
VALUES = ((0, 1, 3), ("v1", "v2"), ("SD", "DS"), ("eager", "graphs") if ON_CUDA else ("eager",), (8192, 2048, 256))
BASELINE = Engine(*(values[0] for values in VALUES))


def all_engines() -> list[Engine]:
    return [Engine(*values) for values in itertools.product(*VALUES)]


def pairs(engine: Engine) -> set[tuple]:
    """Every two of its values, with their places."""
    return set(itertools.combinations(enumerate(astuple(engine)), 2))


def pairwise_cover() -> list[Engine]:
    """The baseline, then always the engine with the most pairs that are new; the first of equals."""
    cover, left = [BASELINE], set().union(*map(pairs, all_engines())) - pairs(BASELINE)
    while left:
        cover.append(max(all_engines(), key=lambda engine: len(pairs(engine) & left)))
        left -= pairs(cover[-1])
    assert len(cover) <= MOST_ENGINES
    return cover


# requests


def prompt_lengths(longest: int) -> list[int]:
    """33 of them: several blocks and near a boundary, where the text then crosses one, or tiny, or long."""
    size, rng = BLOCK_TOKENS, random.Random(0)
    few = [4 * size - 2, longest, 2 * size + 1, 1, size - 1, size, size + 1, 3 * size - 17]
    rest = [rng.randint(2, 5 * size) for _ in range(max(COMPANY) - len(few))]
    return [min(length, longest) for length in few + rest]


def make_texts(llm: LLM, lengths: Sequence[int], load_format: str) -> list[list[int]]:
    """Source text, so that drafts are accepted, or random ids for random weights."""
    if load_format == "dummy":
        rng = random.Random(0)
        return [[rng.randrange(4, llm.core.vocab_size) for _ in range(n)] for n in lengths]
    windows = make_prompts(llm.core.tokenizer.encode, len(lengths), max(lengths))
    return [window[:n] for window, n in zip(windows, lengths, strict=True)]


@dataclass
class Bits:
    """What must be the same of one request."""

    token_ids: list[int]
    logprobs: list[tuple[float, list[int], list[float]]] | None

    @classmethod
    def of(cls, output: CompletionOutput) -> "Bits":
        entries = output.logprobs
        return cls(output.token_ids, entries and [(e.logprob, e.top_ids, e.top_logprobs) for e in entries])

    def difference(self, wanted: "Bits") -> str | None:
        """The first place where they part, in full."""
        if len(self.token_ids) != len(wanted.token_ids):
            return f"{len(self.token_ids)} tokens, must be {len(wanted.token_ids)}"
        for at, (got, want) in enumerate(zip(self.token_ids, wanted.token_ids, strict=True)):
            if got != want:
                return f"token {at} is {got}, must be {want}\n    {self.token_ids}\n    {wanted.token_ids}"
            if self.logprobs is not None and not same_floats(self.logprobs[at], wanted.logprobs[at]):
                return (
                    f"log-probabilities of token {at}:\n    {show(self.logprobs[at])}\n    {show(wanted.logprobs[at])}"
                )
        return None


def same_floats(got: tuple, want: tuple) -> bool:
    """By their bits: a NaN equals itself here, and is no number that a model may give."""
    return show(got) == show(want) and "nan" not in show(got)


def show(entry: tuple[float, list[int], list[float]]) -> str:
    logprob, top_ids, top_logprobs = entry
    best = ", ".join(f"{i}: {value.hex()}" for i, value in zip(top_ids, top_logprobs, strict=True))
    return f"{logprob.hex()} ({logprob:.6f}), best {best}"


# cells


def run(llm: LLM, texts: Sequence[list[int]], num_tokens: int, with_logprobs: bool = True) -> list[RequestOutput]:
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=5 if with_logprobs else None
    )
    return llm.generate(texts, params)


def cells(llm: LLM, texts: list[list[int]], num_tokens: int) -> Iterator[tuple[str, list[RequestOutput], list[int]]]:
    """Name, results and the cached tokens that they must have, of each cell of an engine."""
    for company in COMPANY:
        some = texts[:company]
        cached = [(len(text) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for text in some]
        who = "alone" if company == 1 else f"{company} requests"
        assert llm.core.reset_prefix_cache()
        yield f"cold, {who}", run(llm, some, num_tokens), [0] * company
        yield f"warm, {who}", run(llm, some, num_tokens), cached
        yield f"warm, {who}, tokens alone", run(llm, some, num_tokens, with_logprobs=False), cached


def compare(outputs: list[RequestOutput], wanted: list[Bits], cached: list[int]) -> list[str]:
    faults = []
    for i, (output, bits, num_cached) in enumerate(zip(outputs, wanted, cached, strict=False)):
        what = f"request {i}, {len(output.prompt_token_ids)} tokens"
        difference = Bits.of(output.outputs[0]).difference(bits)
        if difference:
            faults.append(f"{what}: {difference}")
        if output.num_cached_tokens != num_cached:
            faults.append(f"{what}: {output.num_cached_tokens} tokens cached, must be {num_cached}")
    return faults


@dataclass
class Tally:
    engines: int = 0
    cells: int = 0
    same: int = 0
    drafts_accepted: int = 0
    seconds: float = 0.0


class Matrix:
    """One model's engines, and what they gave."""

    def __init__(self, model: str | None, load_format: str, longest: int, num_tokens: int, prefill_scan: str):
        self.model, self.load_format, self.num_tokens = model, load_format, num_tokens
        self.prefill_scan = prefill_scan
        self.lengths = prompt_lengths(longest)
        self.max_model_len = max(self.lengths) + num_tokens + 8
        self.tally, self.differing = Tally(), []
        self.texts: list[list[int]] = []
        self.wanted: list[Bits] = []

    def play(self, engines: Sequence[Engine]) -> None:
        start = time.perf_counter()
        with self.open(BASELINE) as llm:
            self.texts = make_texts(llm, self.lengths, self.load_format)
            for text in self.texts:
                assert llm.core.reset_prefix_cache()
                self.wanted.append(Bits.of(run(llm, [text], self.num_tokens)[0].outputs[0]))
        print(f"baseline: {BASELINE.name}, {len(self.texts)} requests alone, {seconds_since(start)}", flush=True)
        for engine in engines:
            try:
                with self.open(engine) as llm:
                    self.play_engine(engine, llm)
            except Exception:
                print(f"{engine.name}: FAILED\n{traceback.format_exc()}", flush=True)
                self.differing.append(f"{engine.name}: failed")
            self.tally.engines += 1
        self.tally.seconds = round(time.perf_counter() - start, 1)

    def open(self, engine: Engine) -> LLM:
        return engine.open(self.model, self.load_format, self.max_model_len, self.prefill_scan)

    def play_engine(self, engine: Engine, llm: LLM) -> None:
        start = time.perf_counter()
        for name, outputs, cached in cells(llm, self.texts, self.num_tokens):
            faults = compare(outputs, self.wanted, cached)
            accepted = sum(output.num_accepted_tokens for output in outputs)
            self.tally.cells += 1
            self.tally.same += not faults
            self.tally.drafts_accepted += accepted
            verdict = f"{len(faults)} FAULT(S)" if faults else "same bits"
            print(f"{engine.name}, {name}: {verdict}, {accepted} drafts accepted, {seconds_since(start)}", flush=True)
            if faults:
                self.differing.append(f"{engine.name}, {name}")
                print(f"  {faults[0] if len(self.differing) <= 3 else faults[0].splitlines()[0]}", flush=True)
            start = time.perf_counter()

    def result(self) -> dict[str, Any]:
        counts = {f.name: getattr(self.tally, f.name) for f in fields(self.tally)}
        return counts | {"differing": self.differing}


def seconds_since(start: float) -> str:
    return f"{time.perf_counter() - start:.1f} s"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        help="checkpoint folders; default: the model that ships; 1b, qwen-1b: random weights (on a GPU: default, 1b)",
    )
    parser.add_argument("--full", action="store_true", help="every engine, not a pairwise cover")
    parser.add_argument("--shard", default="1/1", metavar="i/n", help="the i-th of n parts of the engines")
    parser.add_argument("--limit", type=int, help="at most so many engines")
    parser.add_argument("--longest", type=int, default=2301 if ON_CUDA else 270, help="tokens of the longest prompt")
    parser.add_argument("--output-tokens", type=int, default=32 if ON_CUDA else 8)
    parser.add_argument("--prefill-scan", default="recurrent", help="of all engines, the baseline too: bits differ")
    parser.add_argument("--list", action="store_true", help="print the engines and run nothing")
    args = parser.parse_args()
    args.models = args.models or (["default", "1b"] if ON_CUDA else ["default"])
    return args


def main() -> None:
    args = parse_args()
    part, num_parts = map(int, args.shard.split("/"))
    engines = (all_engines() if args.full else pairwise_cover())[part - 1 :: num_parts][: args.limit]
    if args.list:
        print("\n".join(engine.name for engine in engines))
        return
    which = f"{'all' if args.full else 'a pairwise cover of all'} engines, part {args.shard}"
    print(f"{torch.cuda.get_device_name() if ON_CUDA else 'cpu'}: {len(engines)} engines of {which}", flush=True)
    load_model, results = mambalign.engine.core.load_model, {}
    for name in args.models:
        mambalign.engine.core.load_model = functools.cache(load_model)  # all engines over the same weights
        model = MODELS.get(name, name)
        has_weights = any(locate(model).glob("*.safetensors"))
        print(f"model {name}", flush=True)
        load_format = "auto" if has_weights else "dummy"
        matrix = Matrix(model, load_format, args.longest, args.output_tokens, args.prefill_scan)
        matrix.play(engines)
        results[name] = matrix.result()
    ok = all(not result["differing"] and result["cells"] for result in results.values())
    print(json.dumps({"same_bits": ok, "full": args.full, "shard": args.shard, "models": results}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
