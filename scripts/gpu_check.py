#!/usr/bin/env python3
"""Everything that needs a GPU, in one command: kernel tests, end-to-end suites, the same-bits matrix, benchmarks.

    gpu_check.py                  all parts, in order
    gpu_check.py tests bits-1b    some of them
    gpu_check.py --list           their commands, and the seconds they may take

Each part is a process with a time limit; its output is passed on as it comes. The last line is one JSON object: each
part's exit code, seconds and figures. A part passes only if it ran: exit code 0, and tests or figures to show for it.
The package need not be installed. Exit code 1 if a part did not pass.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
NEMOTRON, QWEN = "scripts/bench_models/nemotron-h-8b-like", "scripts/bench_models/qwen3_5-9b-like"
EXPERTS = (  # models with mixtures of experts: a part's name, the folder
    ("nemotron-experts", "scripts/bench_models/nemotron-3-30b-a3b-like"),
    ("qwen-experts", "scripts/bench_models/qwen3_5-35b-a3b-like"),
)
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header")
DRAFTS = ("--load-format", "dummy", "--spec-tokens", "3", "--spec-acceptance", "2.4")
SERVE = ("scripts/bench_serving.py", NEMOTRON, *DRAFTS)
BY_CHUNKS = ("--concurrency", "8", "--figures", "prefill,ttft,memory", "--engine", "prefill_scan=chunked")
ALL_BY_CHUNKS = ("--figures", "decode,prefill,ttft,memory", "--engine", "prefill_scan=chunked")
BATCHES = ("--concurrency", "1", "8", "32", "64")
FAMILIES = "worker/tests/test_families_on_gpu.py"
KILL_SECONDS = 10.0  # that a part has to leave once told to


@dataclass(frozen=True)
class Part:
    """One command. `limit`: seconds after which it is stopped; `needs`: modules it cannot run without."""

    name: str
    limit: int
    command: tuple[str, ...]
    needs: tuple[str, ...] = ("llguidance", "msgspec", "zmq")

    @property
    def is_pytest(self) -> bool:
        return "pytest" in self.command


PARTS = (
    Part(
        "tests",
        420,
        (*PYTEST, "kernels/tests", "worker/tests", f"--ignore={FAMILIES}"),
        ("llguidance", "msgspec", "pytest", "hypothesis"),
    ),
    Part("families", 580, (*PYTEST, FAMILIES), ("llguidance", "msgspec", "pytest", "transformers")),
    Part(
        "e2e",
        540,
        (*PYTEST, "-p", "e2e_on_cuda", "e2e/test_prefix_cache_suite.py", "e2e/test_interleavings.py"),
        ("llguidance", "msgspec", "zmq", "pytest", "transformers"),
    ),
    Part("bits-default", 540, ("scripts/same_bits.py", "--models", "default")),
    Part("bits-1b", 540, ("scripts/same_bits.py", "--models", "1b")),
    Part("bits-chunked", 540, ("scripts/same_bits.py", "--models", "1b", "--prefill-scan", "chunked")),
    Part("bits-chunked-qwen", 540, ("scripts/same_bits.py", "--models", "qwen-1b", "--prefill-scan", "chunked")),
    Part("kernels", 180, ("scripts/bench_kernels.py",), ()),
    Part("chains", 90, ("scripts/bench_chains.py",), ()),
    Part("experts", 90, ("scripts/bench_experts.py",), ()),
    Part("drafts", 180, ("scripts/draft_acceptance.py",)),
    Part("precopy", 90, ("scripts/bench_precopy.py", "--quick"), ("msgspec",)),
    Part("decode", 420, (*SERVE, *BATCHES, "--figures", "decode,memory")),
    *(Part(name, 240, ("scripts/bench_serving.py", path, *DRAFTS, *BATCHES, *ALL_BY_CHUNKS)) for name, path in EXPERTS),
    Part("latency", 240, (*SERVE, "--concurrency", "8", "--figures", "prefill,ttft,memory")),
    Part("chunked", 240, (*SERVE, *BY_CHUNKS)),
    Part("chunked-qwen", 240, ("scripts/bench_serving.py", QWEN, *DRAFTS, *BY_CHUNKS)),
    Part("plain", 300, (*SERVE, *BATCHES, "--figures", "decode,prefill,ttft,memory", "--only-plain")),
    Part("start", 420, (*SERVE, *BATCHES, "--figures", "start")),
    Part("trace", 240, (*SERVE, "--concurrency", "32", "--figures", "trace,memory")),
    Part(
        "transformers",
        240,
        (*SERVE, "--concurrency", "1", "8", "--figures", "decode", "--only-plain", "--compare-transformers"),
    ),
)


class Tail:
    """What of a part's output the result is made from."""

    def __init__(self) -> None:
        self.json: dict[str, Any] | None = None
        self.counts: dict[str, int] = {}  # of pytest's last line: passed, failed, ...

    def read(self, line: str) -> None:
        if line.startswith("{"):
            try:
                self.json = json.loads(line)
            except ValueError:
                pass
        elif re.search(r"\d+ (passed|failed|error|skipped).* in [\d.]+s", line):
            self.counts = {word: int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", line.split(" in ")[0])}


def run(part: Part, limit: float, env: dict[str, str]) -> dict[str, Any]:
    """Run one part, output passed on. Returns rc, seconds, whether it passed, and its figures or counts."""
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    script = ROOT / part.command[0]
    if part.command[0].endswith(".py") and not script.exists():
        missing.append(part.command[0])
    if missing:
        print(f"not run: {', '.join(missing)} missing", flush=True)
        return {"passed": False, "rc": None, "why": f"missing: {', '.join(missing)}"}
    start, tail = time.monotonic(), Tail()
    process = subprocess.Popen(
        [sys.executable, *part.command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it started ends with it
    )
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, number)
            time.sleep(KILL_SECONDS)

    timer = threading.Timer(limit, stop)
    timer.daemon = True
    timer.start()
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            tail.read(line)
        rc = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        timer.cancel()
    seconds = round(time.monotonic() - start, 1)
    result: dict[str, Any] = {"rc": rc, "seconds": seconds}
    if timed_out.is_set():
        result["why"] = f"stopped after {limit:.0f} s"
    shown = tail.counts.get("passed", 0) if part.is_pytest else tail.json
    result = {"passed": rc == 0 and not timed_out.is_set() and bool(shown)} | result
    missed = missed_figures(tail.json or {})
    result |= {"missed": missed} if missed else {}
    return result | ({"tests": tail.counts} if part.is_pytest else {"figures": tail.json})


def missed_figures(figures: dict[str, Any]) -> list[str]:
    """Names of the figures that fall short of what they must reach. The part has passed all the same: it has run."""
    missed = []
    for name, value in figures.items():
        if isinstance(value, dict):
            missed += [name] if value.get("met") is False else missed_figures(value)
    return missed


def environment(packages: Path) -> dict[str, str]:
    """Where the parts find the package (through links, if it is not installed) and the scripts' own modules."""
    paths = [str(SCRIPTS)]
    if importlib.util.find_spec("mambalign") is None:
        (packages / "mambalign").mkdir()
        for floor in ("engine", "worker", "kernels"):
            (packages / "mambalign" / floor).symlink_to(ROOT / floor)
        paths.append(str(packages))
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def device() -> str | None:
    """Name of the GPU, asked for in a process of its own: this one must hold none of its memory."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--skip", nargs="+", default=[], metavar="part", help="all but these")
    parser.add_argument("--seconds", type=float, help="for all parts together: none starts or runs on after that")
    parser.add_argument("--list", action="store_true", help="print the parts and run nothing")
    parser.add_argument(
        "--no-gpu", action="store_true", help="run the parts on a machine without one, as far as they go"
    )
    args = parser.parse_args()
    unknown = {*args.parts, *args.skip} - {*names}
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    args.parts = [part for part in PARTS if part.name in (args.parts or names) and part.name not in args.skip]
    return args


def main() -> None:
    args = parse_args()
    if args.list:
        for part in args.parts:
            print(f"{part.name:14} at most {part.limit:4} s  python {' '.join(part.command)}")
        return
    gpu, start = device(), time.monotonic()
    if gpu is None and not args.no_gpu:
        sys.exit("gpu_check: no CUDA device here (--no-gpu runs what can run without)")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as packages:
        env = environment(Path(packages))
        for part in args.parts:
            left = args.seconds - (time.monotonic() - start) if args.seconds else part.limit
            print(f"\n== {part.name}: python {' '.join(part.command)}", flush=True)
            if left < 5:
                results[part.name] = {"passed": False, "rc": None, "why": "no time left"}
            else:
                results[part.name] = run(part, min(left, part.limit), env)
            verdict = {key: value for key, value in results[part.name].items() if key != "figures"}
            print(f"== {part.name}: {verdict}", flush=True)
    passed = all(result["passed"] for result in results.values()) and bool(results)
    print(json.dumps({"device": gpu, "passed": passed, "parts": results}))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
