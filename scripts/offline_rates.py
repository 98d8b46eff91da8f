"""Output tokens a second of whole calls, in process: this engine's, and transformers' `generate` on the same folder."""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from mambalign.engine.bench_traffic import stdlib_sources

Rates = dict[str, list[float]]  # "cold"/"warm" -> output tokens a second, one per run


def make_prompts(encode: Callable[[str], list[int]], num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Windows of standard-library modules, in the order of their names: the same on every run."""
    prompts: list[list[int]] = []
    for source in stdlib_sources():
        token_ids = encode(source)
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
