"""What the engine serves on this machine. Three forms; each ends in one JSON line.

With `--url` it is `mambalign bench`, a load on a running server; `--url http://... --help` lists its options. The other
two run engines in process, and print the ceiling first.

With `--figures`: decode, prefill, time to first token, start, memory and a multi-turn trace, each beside its own
ceiling (`serving_figures.py`, `step_model.py`). A CPU runs them with small numbers. On a GPU, the benchmark:

    bench_serving.py scripts/bench_models/nemotron-h-8b-like --load-format dummy --spec-acceptance 2.4 \\
        --concurrency 1 8 32 64 --figures decode,prefill,ttft,memory --plain

With neither: tokens a second of the engine beside transformers' `generate` on the same folder, in fp32 on the CPU.
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
import tempfile
import time
from importlib import import_module
from typing import Any

from offline_rates import compare, report

FIGURES = ("start", "decode", "prefill", "ttft", "memory", "trace")
PEAK_TFLOPS = 790.0  # bf16 matmuls of random data on an H200
# What a process of its own measures. Imported only there: an engine sets OpenMP up before torch is imported.
CHILDREN = {
    "ceiling": "machine_rates.measure_ceiling",
    "machine": "machine_rates.measure_machine",
    "mambalign": "offline_rates.measure_mambalign",
    "transformers": "offline_rates.measure_transformers",
    "transformers decode": "offline_rates.measure_transformers_decode",
    "figures": "serving_figures.measure_figures",
}
SIZES = (  # option, on a CPU, for figures on a GPU
    ("prompt_tokens", 512, 1024),
    ("output_tokens", 128, 256),
    ("prefill_tokens", 1024, 8192),
    ("ttft_tokens", 512, 4096),
    ("users", 4, 32),
)


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


def has_cuda() -> bool:
    import torch  # only here: the parent of a comparison needs none

    return torch.cuda.is_available()


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


def measure_all_rates(args: argparse.Namespace) -> None:
    """Output tokens a second of whole calls, beside transformers' where asked for."""
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


def main() -> None:
    if any(argument.split("=")[0] == "--url" for argument in sys.argv):
        from mambalign.engine.bench import bench_main

        sys.exit(bench_main(sys.argv[1:], "bench_serving.py"))
    args = parse_args()
    if args.child:
        module, function = CHILDREN[args.child].split(".")
        print("\n" + json.dumps(getattr(import_module(module), function)(args)))
    elif args.figures:
        measure_all_figures(args)
    else:
        measure_all_rates(args)


if __name__ == "__main__":
    main()
