"""What the engine serves on this machine. Two forms; each prints the ceiling first and ends in one JSON line.

With `--figures`: decode, prefill, time to first token, start, memory and a multi-turn trace, each beside its own
ceiling (`serving_figures.py`, `step_model.py`). A CPU runs them with small numbers. On a GPU, the benchmark:

    bench_serving.py scripts/bench_models/nemotron-h-8b-like --load-format dummy --spec-acceptance 2.4 \\
        --concurrency 1 8 32 64 --figures decode,prefill,ttft,memory --plain

Without: tokens a second of the engine beside transformers' `generate` on the same folder, in fp32 on the CPU.
Each engine runs in a process of its own, so that none inherits another's memory or threads. Prompts are
source text of the standard library, `--prompt-tokens` long, all different; every request generates
`--output-tokens` greedily. Cold: prompts the engine has not seen. Warm: the same ones again. A rate is output
tokens over the seconds of the whole call, prompts included; median and spread over the runs.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

Rates = dict[str, list[float]]  # "cold"/"warm" -> output tokens a second, one per run


FIGURES = ("start", "decode", "prefill", "ttft", "memory", "trace")
PEAK_TFLOPS = 790.0  # bf16 matmuls of random data on an H200


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint folder or hub id (default: the model that ships)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="requests at a time")
    parser.add_argument("--prompt-tokens", type=int, help="default: 512, and 1024 for figures on a GPU")
    parser.add_argument("--output-tokens", type=int, help="default: 128, and 256 for figures on a GPU")
    parser.add_argument("--spec-tokens", type=int, nargs="+", default=[3], help="several: one engine each")
    parser.add_argument("--runs", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads of every process")
    parser.add_argument("--compare-transformers", action="store_true", help="run transformers' generate too")
    figures = parser.add_argument_group("figures")
    figures.add_argument("--figures", help=f"comma-separated, of {','.join(FIGURES)}")
    figures.add_argument("--plain", action="store_true", help="one more engine, without drafts and without cache")
    figures.add_argument("--only-plain", action="store_true", help="that engine alone")
    figures.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights")
    figures.add_argument("--spec-acceptance", type=float, help="mean of tokens kept a step, whatever they are")
    figures.add_argument("--prefill-tokens", type=int, help="default: 8192 on a GPU, else 1024")
    figures.add_argument("--ttft-tokens", type=int, help="default: 4096 on a GPU, else 512")
    figures.add_argument("--users", type=int, help="of the trace (default: 32 on a GPU, else 4)")
    figures.add_argument("--max-num-batched-tokens", type=int, default=8192)
    figures.add_argument("--engine", action="append", default=[], metavar="OPTION=VALUE", help="any other option")
    figures.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS, help="the ceiling's matmul rate on a GPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # what this process measures: one step of the parent
    parser.add_argument("--job", help=argparse.SUPPRESS)  # JSON: what the parent tells that step
    args = parser.parse_args()
    if args.runs < 3:
        parser.error(f"--runs must be at least 3, got {args.runs}")
    unknown = set(args.figures.split(",")) - {*FIGURES} if args.figures else set()
    if unknown:
        parser.error(f"--figures: no {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    on_gpu = bool(args.figures) and has_cuda()
    for name, small, large in SIZES:
        if getattr(args, name) is None:
            setattr(args, name, large if on_gpu else small)
    return args


SIZES = (  # option, on a CPU, for figures on a GPU
    ("prompt_tokens", 512, 1024),
    ("output_tokens", 128, 256),
    ("prefill_tokens", 1024, 8192),
    ("ttft_tokens", 512, 4096),
    ("users", 4, 32),
)


def has_cuda() -> bool:
    import torch  # only here: the parent of a comparison needs none

    return torch.cuda.is_available()


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


def measure_rates() -> dict[str, float]:
    """What this CPU could do: fp32 GEMM rate and copy bandwidth."""
    import torch

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
    import torch
    from safetensors import safe_open

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
    import torch

    if torch.cuda.is_available():
        from bench_precopy import copy_ceiling

        name, copy, flops = torch.cuda.get_device_name(), copy_ceiling() * 1e12, args.peak_tflops * 1e12
    else:
        ceiling = measure_rates()
        name, copy, flops = "cpu", ceiling["copy_gb_per_s"] * 1e9, ceiling["gemm_gflops"] * 1e9
    return {"device": name, "bytes_per_s": copy, "flops_per_s": flops, "torch": torch.__version__}


def engine_options(args: argparse.Namespace, is_plain: bool) -> dict[str, Any]:
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


def measure_figures(args: argparse.Namespace) -> dict[str, Any]:
    """One engine from its start, and the figures asked for."""
    from serving_figures import Bench, Sizes
    from step_model import Machine

    from mambalign.engine import LLM

    job = json.loads(args.job)
    names = ("concurrency", *(name for name, _, _ in SIZES), "runs")
    sizes = Sizes(**{name: getattr(args, name) for name in names})
    options = engine_options(args, job["is_plain"])
    longest = {"max_model_len": sizes.max_model_len} | options
    llm = LLM(args.model, **longest)
    ready = time.time() - job["started_at"]
    machine = Machine(job["machine"]["bytes_per_s"], job["machine"]["flops_per_s"])
    bench = Bench(llm, sizes, machine, None if job["is_plain"] else args.spec_acceptance)
    first = bench.run([bench.prompt(100)], 8)[0]
    bench.results["start"] = {"ready_s": round(ready, 2), "first_token_ms": round(first.ttft * 1000, 1)}
    print(f"start            ready after {ready:.1f} s, first token {first.ttft * 1000:.0f} ms later", flush=True)
    for line in llm.core.plan:
        print(f"                 {line}", flush=True)
    for figure in job["figures"]:
        if figure != "start":
            getattr(bench, figure)()
    return bench.results


def measure_transformers_decode(args: argparse.Namespace) -> dict[str, Any]:
    """Decode rate of transformers' `generate`, for scale: tokens after the first over the time they add, plain."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mambalign.engine.checkpoint import locate

    path, on_gpu = locate(args.model), torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    if args.load_format == "dummy":
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None  # no token ends the text
    results, num_tokens = {}, min(args.output_tokens, 64)

    def seconds(prompt: torch.Tensor, num_tokens: int) -> float:
        start = time.perf_counter()
        options = dict(attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0)
        tokens = model.generate(prompt, max_new_tokens=num_tokens, **options)
        assert len(tokens.tolist()[0]) == prompt.shape[1] + num_tokens
        return time.perf_counter() - start

    for rows in [rows for rows in args.concurrency if rows <= 8]:
        prompt = torch.randint(4, model.config.vocab_size, (rows, args.prompt_tokens), device=device)
        try:
            seconds(prompt, 2)
            rate = rows * (num_tokens - 1) / (seconds(prompt, num_tokens) - seconds(prompt, 1))
        except torch.OutOfMemoryError:
            print(f"transformers     decode {rows}: out of memory", flush=True)
            continue
        results[f"decode {rows}"] = {"once": round(rate, 2), "unit": "tok/s", "num_tokens": num_tokens}
        print(f"transformers     decode {rows}: {rate:.1f} tok/s (once, {num_tokens} tokens)", flush=True)
    return results


CHILDREN = {
    "ceiling": measure_ceiling,
    "mambalign": measure_mambalign,
    "transformers": measure_transformers,
    "machine": measure_machine,
    "figures": measure_figures,
    "transformers decode": measure_transformers_decode,
}


def in_child(
    args: argparse.Namespace,
    child: str,
    spec_tokens: int = 0,
    job: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Measure in a new process. Its last line of output is the result; those before it are passed on."""
    command = [sys.executable, __file__, *([args.model] if args.model else []), "--child", child]
    command += ["--spec-tokens", str(spec_tokens), "--concurrency", *map(str, args.concurrency)]
    for name in (*(name for name, _, _ in SIZES), "runs", "load_format", "max_num_batched_tokens", "peak_tflops"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if args.spec_acceptance is not None:
        command += ["--spec-acceptance", str(args.spec_acceptance)]
    command += [f"--engine={setting}" for setting in args.engine]
    command += ["--job", json.dumps(job | {"started_at": time.time()})] if job else []
    threads = str(args.threads)
    settings = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    last = ""
    with subprocess.Popen(
        command, env=os.environ | settings | (env or {}), stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            print(last, end="", flush=True)
            last = line if line.strip() else ""
    if process.returncode != 0:
        print(last, end="", flush=True)
        raise SystemExit(f"{child} failed with exit code {process.returncode}")
    return json.loads(last)


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


def measure_all_figures(args: argparse.Namespace) -> None:
    """Figures of the engine with drafts and cache, and without where asked for; each engine in a process."""
    from mambalign.engine.client import OPENMP_SETTINGS  # its own process has them before torch is imported

    machine = in_child(args, "machine")
    print(
        f"{machine['device']}, torch {machine['torch']}: copies at {machine['bytes_per_s'] / 1e12:.3f} TB/s (read plus "
        f"written), matmuls at {machine['flops_per_s'] / 1e12:.1f} TFLOP/s: what the ceilings are made of",
        flush=True,
    )
    figures = args.figures.split(",")
    setting = {name: getattr(args, name) for name, _, _ in SIZES} | {"spec_acceptance": args.spec_acceptance}
    result: dict[str, Any] = {"model": args.model or "default", "machine": machine, "setting": setting}
    engines = [] if args.only_plain else [(f"cache + {s} drafts", s, False) for s in args.spec_tokens]
    engines += [("plain", 0, True)] if args.plain or args.only_plain else []
    with tempfile.TemporaryDirectory() as kernels:
        for name, spec_tokens, is_plain in engines:
            job = {"is_plain": is_plain, "machine": machine, "figures": figures}
            env = OPENMP_SETTINGS | ({"TRITON_CACHE_DIR": kernels} if "start" in figures else {})
            if "start" in figures and not is_plain:
                print(f"{name}, with an empty kernel cache", flush=True)
                cold = in_child(args, "figures", spec_tokens, job | {"figures": []}, env)
                result[f"{name}, empty kernel cache"] = cold
            print(name, flush=True)
            result[name] = in_child(args, "figures", spec_tokens, job, env)
    if args.compare_transformers:
        result["transformers"] = in_child(args, "transformers decode")
    print(json.dumps(result))


def main() -> None:
    args = parse_args()
    if args.child:
        print("\n" + json.dumps(CHILDREN[args.child](args)))
        return
    if args.figures:
        measure_all_figures(args)
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
