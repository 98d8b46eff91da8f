#!/usr/bin/env python3
"""A server under mixed traffic for a long time: does it keep its memory, its files, its blocks, and its texts?

    python e2e/soak.py --minutes 60

Clients stream, leave, reset, send nonsense, ask for JSON and several choices, over prompts that share prefixes, in
pools that are too small. Every greedy text must be what it was the first time. Ends with a table and one line of JSON;
exit code 1 when a bound is passed.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engine" / "tests"))

from server_process import ServerProcess

OPTIONS = ("--cache-memory", "40MiB", "--max-model-len", "640", "--max-num-seqs", "6", "--mamba-block-size", "32")
NUM_CLIENTS = 8
SAMPLE_SECONDS = 0.5
WARM_UP = 0.4  # of the time: what is compiled, cached and pooled once has its place by then
MOST_GROWTH = 0.06  # of the resident memory, over the time after it,
MOST_GROWTH_MIB = 24.0  # or so much: a short run still meets things for the first time
MOST_NEW_FILES = 24  # open at its end beyond the median: connections that are still closing
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@dataclass
class Process:
    """What one process of the server held, sample by sample."""

    pid: int
    rss: list[float] = field(default_factory=list)  # MiB
    files: list[int] = field(default_factory=list)

    def sample(self) -> None:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        self.rss.append(pages * 4096 / 2**20)
        self.files.append(sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir()))

    def growth(self) -> float:
        """MiB from the middle of the first third after the warm-up to that of the last, by their medians."""
        late = self.rss[int(len(self.rss) * WARM_UP) :]
        third = max(1, len(late) // 3)
        return statistics.median(late[-third:]) - statistics.median(late[:third])

    def summary(self) -> dict[str, float]:
        return {
            "rss_mib": round(self.rss[-1], 1),
            "growth_mib": round(self.growth(), 1),
            "files": self.files[-1],
            "median_files": statistics.median(self.files),
        }


@dataclass
class Soak:
    """`faults`: what must not be, in words."""

    server: ServerProcess
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    texts: dict[str, str] = field(default_factory=dict)  # greedy request -> its text
    faults: list[str] = field(default_factory=list)

    def prompt(self) -> str:
        """One of a tree's: a shared beginning, one of a few middles, and rarely an end of its own."""
        rng = self.rng
        shared = "import os\nimport sys\n" * rng.choice([1, 4, 12])
        middle = f"def f{rng.randrange(6)}(x):\n" * rng.choice([1, 3, 20])
        return shared + middle + (f"# {rng.random()}\n" if rng.random() < 0.1 else "")

    async def run(self, seconds: float) -> list[Process]:
        processes = [Process(self.server.process.pid), Process(self.server.engine_pid())]
        end = time.monotonic() + seconds
        async with aiohttp.ClientSession(self.server.url, timeout=aiohttp.ClientTimeout(total=120)) as session:
            clients = [asyncio.create_task(self.client(session, end)) for _ in range(NUM_CLIENTS)]
            while time.monotonic() < end:
                for process in processes:
                    process.sample()
                await asyncio.sleep(SAMPLE_SECONDS)
            await asyncio.gather(*clients)
            await self.check_idle(session)
        for process in processes:
            process.sample()
        return processes

    async def client(self, session: aiohttp.ClientSession, end: float) -> None:
        kinds: list[tuple[Callable[[aiohttp.ClientSession], Awaitable[None]], int]] = [
            (self.whole, 6), (self.stream, 6), (self.leave, 4), (self.choices, 2),
            (self.as_json, 2), (self.mistake, 2), (self.nonsense, 1), (self.reset_cache, 1),
        ]  # fmt: skip
        while time.monotonic() < end:
            (kind,) = self.rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
            self.counts[kind.__name__] += 1
            try:
                await kind(session)
            except Exception as error:
                self.faults.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    def body(self, **fields: Any) -> dict[str, Any]:
        length = self.rng.choice([1, 7, 16, 40, 90])
        return {"prompt": self.prompt(), "max_tokens": length, "temperature": 0, "ignore_eos": True} | fields

    def compare(self, body: dict[str, Any], text: str) -> None:
        key = json.dumps({name: value for name, value in body.items() if name != "stream"})
        if self.texts.setdefault(key, text) != text:
            self.faults.append(f"{key}: {text!r}, and before {self.texts[key]!r}")
        self.counts["compared"] += 1
        if len(self.texts) > 2000:
            self.texts.clear()

    async def whole(self, session: aiohttp.ClientSession) -> None:
        body = self.body()
        async with session.post("/v1/completions", json=body) as answer:
            result = await answer.json()
        assert answer.status == 200, result
        assert result["usage"]["completion_tokens"] == body["max_tokens"]
        self.compare(body, result["choices"][0]["text"])

    async def stream(self, session: aiohttp.ClientSession) -> None:
        body = self.body(stream=True)
        text, is_done = "", False
        async with session.post("/v1/completions", json=body) as answer:
            async for line in answer.content:
                data = line.strip().removeprefix(b"data: ")
                is_done = is_done or data == b"[DONE]"
                if data and not is_done:
                    text += json.loads(data)["choices"][0]["text"]
        assert is_done
        self.compare(body, text)

    async def leave(self, session: aiohttp.ClientSession) -> None:
        """In the middle of a stream, or before it begins."""
        body = self.body(stream=True, max_tokens=300)
        most = self.rng.randrange(5)
        try:
            async with asyncio.timeout(self.rng.choice([0.02, 60])):
                async with session.post("/v1/completions", json=body) as answer:
                    async for _ in answer.content:
                        most -= 1
                        if most < 0:
                            answer.close()
                            break
        except TimeoutError:
            pass

    async def choices(self, session: aiohttp.ClientSession) -> None:
        body = self.body(n=3, temperature=0.9, seed=7, logprobs=2)
        async with session.post("/v1/completions", json=body) as answer:
            result = await answer.json()
        self.compare(body, json.dumps([choice["text"] for choice in result["choices"]]))

    async def as_json(self, session: aiohttp.ClientSession) -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        body = {"messages": [{"role": "user", "content": "a"}], "response_format": wanted, "max_tokens": 60}
        async with session.post("/v1/chat/completions", json=body | {"temperature": 0}) as answer:
            result = await answer.json()
        (choice,) = result["choices"]
        assert choice["finish_reason"] == "length" or "a" in json.loads(choice["message"]["content"]), result

    async def mistake(self, session: aiohttp.ClientSession) -> None:
        wrong = self.rng.choice([{"n": 0}, {"prompt": "x" * 5000}, {"model": "other"}, {"temprature": 1}])
        async with session.post("/v1/completions", json=self.body(**wrong)) as answer:
            assert 400 <= answer.status < 500, await answer.text()

    async def nonsense(self, session: aiohttp.ClientSession) -> None:
        _, writer = await asyncio.open_connection(session._base_url.host, session._base_url.port)
        half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        writer.write(self.rng.choice([b"\0" * 50, b"GET / HTTP/1.1\r\n\r\n", half, b""]))
        await writer.drain()
        writer.transport.abort()

    async def reset_cache(self, session: aiohttp.ClientSession) -> None:
        async with session.post("/reset_prefix_cache") as answer:
            assert answer.status == 200

    async def check_idle(self, session: aiohttp.ClientSession) -> None:
        """Nobody asks for anything any more: nothing runs, and no block is held."""
        held = ("num_requests_running", "num_requests_waiting", 'kv_cache_blocks{state="held"}')
        held += ('mamba_cache_blocks{state="held"}',)
        for _ in range(200):
            metrics = await asyncio.to_thread(self.server.metrics)
            if not any(metrics[name] for name in held):
                break
            await asyncio.sleep(0.1)
        else:
            self.faults.append(f"held when idle: { {name: metrics[name] for name in held} }")
        async with session.get("/health") as answer:
            if answer.status != 200:
                self.faults.append(f"health: {await answer.text()}")
        self.counts["preemptions"] = int(metrics["num_preemptions_total"])
        self.counts["cached tokens"] = int(metrics["prefix_cache_hits_total"])
        self.counts["tokens"] = int(metrics["generation_tokens_total"])


def soak(minutes: float, seed: int = 0) -> dict[str, Any]:
    """Run it; `faults` of the result is empty when all held."""
    with ServerProcess(*OPTIONS) as server:
        run = Soak(server, random.Random(seed))
        server.url  # noqa: B018  waits until it serves
        processes = asyncio.run(run.run(60 * minutes))
        for name, process in zip(("server", "engine"), processes, strict=True):
            if process.growth() > max(MOST_GROWTH * process.rss[-1], MOST_GROWTH_MIB):
                run.faults.append(f"{name}: grew by {process.growth():.1f} MiB to {process.rss[-1]:.1f} MiB")
            if process.files[-1] > statistics.median(process.files) + MOST_NEW_FILES:
                run.faults.append(f"{name}: {process.files[-1]} open files")
        if (code := server.stop()) != 0:
            run.faults.append(f"exit code {code}")
        if "Traceback" in server.output:
            run.faults.append(server.output[server.output.index("Traceback") :][:2000])
    names = dict(zip(("server", "engine"), (process.summary() for process in processes), strict=True))
    return {"minutes": minutes, "seed": seed, **names, "counts": dict(run.counts), "faults": run.faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its server ends with it
    result = soak(args.minutes, args.seed)
    for name, count in result["counts"].items():
        print(f"{name:>16} {count:>9,}")
    for name in ("server", "engine"):
        print(f"{name:>16} {result[name]}")
    print(json.dumps(result))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
