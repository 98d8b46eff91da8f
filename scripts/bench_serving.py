"""Tokens a second of the engine, beside transformers' `generate` on the same folder and the same machine.

Each engine runs in a process of its own, so that none inherits another's memory or threads. Prompts are
source text of the standard library, `--prompt-tokens` long, all different; every request generates
`--output-tokens` greedily. Cold: prompts the engine has not seen. Warm: the same ones again. A rate is output
tokens over the seconds of the whole call, prompts included. Prints the ceiling first, then median and spread
over the runs, then one JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

Rates = dict[str, list[float]]  # "cold"/"warm" -> output tokens a second, one per run


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the model that ships)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="requests at a time")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--spec-tokens", type=int, nargs="+", default=[3], help="several: one engine each")
    parser.add_argument("--runs", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads of every process")
    parser.add_argument("--compare-transformers", action="store_true", help="run transformers' generate too")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # what this process measures: one step of the parent
    args = parser.parse_args()
    if args.runs < 3:
        parser.error(f"--runs must be at least 3, got {args.runs}")
    return args


def make_prompts(encode: Callable[[str], list[int]], num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Windows of standard-library modules, in the order of their names: the same on every run."""
    prompts: list[list[int]] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        token_ids = encode(path.read_text(encoding="utf-8", errors="replace"))
        prompts += [
            token_ids[start : start + num_tokens] for start in range(0, len(token_ids) - num_tokens + 1, num_tokens)
        ]
        if len(prompts) >= num_prompts:
            return prompts[:num_prompts]
    raise SystemExit(f"the standard library holds {len(prompts)} prompts of {num_tokens} tokens, not {num_prompts}")


def measure(args: argparse.Namespace, prompts: list[list[int]], generate: Callable, warm: bool) -> dict[str, Any]:
    """Rates of every concurrency, and the first run's tokens to compare engines with."""
    results: dict[str, Any] = {}
    unused = iter(prompts)
    for concurrency in args.concurrency:
        rates: Rates = {"cold": [], "warm": []}
        first_tokens: list[list[int]] = []
        for run in range(args.runs + 1):
            batch = [next(unused) for _ in range(concurrency)]
            for kind in ("cold", "warm") if warm else ("cold",):
                start = time.perf_counter()
                outputs = generate(batch)
                seconds = time.perf_counter() - start
                assert all(len(output) == args.output_tokens for output in outputs)
                first_tokens = first_tokens or outputs
                if run > 0:
                    rates[kind].append(concurrency * args.output_tokens / seconds)
        results[str(concurrency)] = {"rates": rates, "tokens": first_tokens}
    return results


def num_prompts(args: argparse.Namespace) -> int:
    return sum(args.concurrency) * (args.runs + 1)


def measure_mambalign(args: argparse.Namespace) -> dict[str, Any]:
    from mambalign.engine import LLM, SamplingParams

    llm = LLM(
        args.model,
        spec_tokens=args.spec_tokens[0],
        max_num_seqs=max(args.concurrency),
        max_model_len=args.prompt_tokens + args.output_tokens,
    )
    params = SamplingParams(max_tokens=args.output_tokens, temperature=0.0, ignore_eos=True)
    drafts = {"verified": 0, "accepted": 0}

    def generate(batch: list[list[int]]) -> list[list[int]]:
        outputs = llm.generate(batch, params)
        drafts["verified"] += sum(output.num_draft_tokens for output in outputs)
        drafts["accepted"] += sum(output.num_accepted_tokens for output in outputs)
        return [output.outputs[0].token_ids for output in outputs]

    prompts = make_prompts(llm.core.tokenizer.encode, num_prompts(args), args.prompt_tokens)
    return {"by_concurrency": measure(args, prompts, generate, warm=True), "drafts": drafts}


def measure_transformers(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    from mambalign.engine.checkpoint import load_tokenizer, locate

    path = locate(args.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # no token ends the text

    def generate(batch: list[list[int]]) -> list[list[int]]:
        prompt = torch.tensor(batch)
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=args.output_tokens,
            pad_token_id=0,
        )
        return tokens[:, prompt.shape[1] :].tolist()

    tokenizer = load_tokenizer(path)
    prompts = make_prompts(tokenizer.encode, num_prompts(args), args.prompt_tokens)
    return {"by_concurrency": measure(args, prompts, generate, warm=False)}


def measure_ceiling(args: argparse.Namespace) -> dict[str, Any]:
    """What the machine could do: fp32 GEMM rate, memory bandwidth, and the tokens a second they allow."""
    import torch
    from safetensors import safe_open

    from mambalign.engine.checkpoint import locate

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
    num_params = 0  # that a token passes: without drafter, and the embedding is looked up (but may be the head)
    for file in locate(args.model).glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            names = [name for name in weights.keys() if not name.startswith("mtp.")]
            skipped = "embed" if any("lm_head" in name for name in names) else None
            for name in names:
                if skipped is None or skipped not in name:
                    num_params += torch.Size(weights.get_slice(name).get_shape()).numel()
    gemm = 2 * 1024**3 / best_seconds(lambda: torch.mm(a, b))
    # A prompt token and an output token each pass every weight once; attention and scan are left out.
    tokens_per_output = 1 + args.prompt_tokens / args.output_tokens
    return {
        "gemm_gflops": gemm / 1e9,
        "copy_gb_per_s": 2 * source.numel() * 4 / best_seconds(lambda: target.copy_(source)) / 1e9,
        "num_params": num_params,
        "output_tokens_per_s": gemm / (2 * num_params * tokens_per_output),
    }


CHILDREN = {"ceiling": measure_ceiling, "mambalign": measure_mambalign, "transformers": measure_transformers}


def in_child(args: argparse.Namespace, child: str, spec_tokens: int = 0) -> dict[str, Any]:
    """Measure in a new process; its last line of output is the result."""
    command = [sys.executable, __file__, "--child", child, "--spec-tokens", str(spec_tokens)]
    command += ["--model", args.model] if args.model else []
    command += ["--concurrency", *map(str, args.concurrency), "--runs", str(args.runs)]
    command += ["--prompt-tokens", str(args.prompt_tokens), "--output-tokens", str(args.output_tokens)]
    threads = str(args.threads)
    env = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{child} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def report(name: str, concurrency: str, kind: str, rates: list[float], ceiling: float) -> dict[str, Any]:
    middle = median(rates)
    print(
        f"{name:20} concurrency {concurrency:>3} {kind:5} {middle:8.1f} tok/s  "
        f"({min(rates):.1f} to {max(rates):.1f}, {len(rates)} runs)  {middle / ceiling:6.1%} of the ceiling",
        flush=True,
    )
    figures = {"median": round(middle, 2), "min": round(min(rates), 2), "max": round(max(rates), 2)}
    return {"engine": name, "concurrency": int(concurrency), "kind": kind, **figures}


def compare(figures: list[dict[str, Any]], tokens: dict[str, dict[str, list[list[int]]]]) -> list[dict[str, Any]]:
    """Print each engine's rate over transformers' at the same concurrency, and how many texts are the same."""
    ratios = []
    baseline = {f["concurrency"]: f["median"] for f in figures if f["engine"] == "transformers"}
    for f in figures:
        if f["engine"] == "transformers" or f["concurrency"] not in baseline:
            continue
        concurrency = str(f["concurrency"])
        ours, theirs = tokens[f["engine"]][concurrency], tokens["transformers"][concurrency]
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        ratio = round(f["median"] / baseline[f["concurrency"]], 2)
        print(
            f"{f['engine']:20} concurrency {concurrency:>3} {f['kind']:5} {ratio:8.2f} x transformers  "
            f"({same} of {len(ours)} texts the same)"
        )
        ratios.append({key: f[key] for key in ("engine", "concurrency", "kind")} | {"ratio": ratio, "same": same})
    return ratios


def main() -> None:
    args = parse_args()
    if args.child:
        print("\n" + json.dumps(CHILDREN[args.child](args)))
        return
    load = os.getloadavg()[0]  # before anything of ours runs
    ceiling = in_child(args, "ceiling") | {"load": load}
    limit = ceiling["output_tokens_per_s"]
    if load > 1.0:
        print(f"the machine is busy (load {load:.1f}): rates will be low and spread", flush=True)
    print(
        f"ceiling: {ceiling['gemm_gflops']:.0f} GFLOP/s in fp32 GEMM and {ceiling['copy_gb_per_s']:.1f} GB/s of "
        f"copying with {args.threads} threads; at that GEMM rate {limit:.0f} output tokens a second "
        f"({ceiling['num_params'] / 1e6:.1f} M parameters, {args.prompt_tokens} + {args.output_tokens} tokens)",
        flush=True,
    )
    engines = [(f"mambalign S={s}", "mambalign", s) for s in args.spec_tokens]
    engines += [("transformers", "transformers", 0)] if args.compare_transformers else []
    figures: list[dict[str, Any]] = []
    tokens: dict[str, dict[str, list[list[int]]]] = {}
    drafts: dict[str, dict[str, int]] = {}
    for name, child, spec_tokens in engines:
        result = in_child(args, child, spec_tokens)
        tokens[name] = {c: entry["tokens"] for c, entry in result["by_concurrency"].items()}
        for concurrency, entry in result["by_concurrency"].items():
            for kind, rates in entry["rates"].items():
                if rates:
                    figures.append(report(name, concurrency, kind, rates, limit))
        if result.get("drafts", {}).get("verified"):
            drafts[name] = result["drafts"]
            print(f"{name:20} accepted {drafts[name]['accepted']} of {drafts[name]['verified']} drafts")
    ratios = compare(figures, tokens)
    setting = {"prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens, "threads": args.threads}
    print(
        json.dumps({**setting, "ceiling": ceiling, "output_tokens_per_s": figures, "drafts": drafts, "ratios": ratios})
    )


if __name__ == "__main__":
    main()
