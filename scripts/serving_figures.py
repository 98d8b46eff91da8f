"""The figures of a serving engine, measured by stepping it by hand: every step's time and what each row gained.

One engine per process. Each figure prints its ceiling (`step_model.py`) before the value and the spread over runs.
Prompts are random token ids, new ones in every run, so that nothing is cached unless a figure says so.
"""

import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from step_model import Machine, StepModel

from mambalign.engine import LLM, SamplingParams
from mambalign.engine.client import RequestFactory
from mambalign.engine.messages import EngineOutput, EngineRequest

FIRST_TOKEN = 4  # ids below it are special in the models that are measured
# The 8B benchmark configuration on an H200, cache and three drafts: what must be reached, 80% of the ceiling or less.
MUST = {
    "decode 1": 410,
    "decode 8": 2720,
    "decode 32": 7200,
    "decode 64": 8600,
    "prefill": 40_000,
    "ttft cold": 106.0,
    "ttft again": 15.0,
    "ttft next turn": 22.0,
}
# Without drafts and cache: the decode rates of an existing engine.
MUST_PLAIN = {"decode 1": 217, "decode 8": 1555, "decode 32": 4800, "decode 64": 7498}
MUST_MODEL, MUST_DEVICE = "nemotron-h-8b-like", "NVIDIA H200"


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


@dataclass
class Timed:
    """A request and when its tokens were seen, in seconds of `time.perf_counter`."""

    request: EngineRequest
    asked: float
    seen: list[tuple[float, int]] = field(default_factory=list)  # (when, tokens that came)
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    ended: bool = False

    def add(self, output: EngineOutput, now: float) -> None:
        if output.finish_reason == "error":
            raise RuntimeError(output.error)
        if output.new_token_ids:
            self.seen.append((now, len(output.new_token_ids)))
            self.token_ids += output.new_token_ids
        self.num_cached_tokens = output.num_cached_tokens
        self.ended = output.finish_reason is not None

    @property
    def first(self) -> float:
        return self.seen[0][0]

    @property
    def ttft(self) -> float:
        return self.first - self.asked


class Bench:
    """An engine, its ceiling, and the figures measured on it, as numbers under `results`."""

    def __init__(self, llm: LLM, sizes: Sizes, machine: Machine, mean_kept: float | None, seed: int = 0):
        """mean_kept: tokens that synthetic acceptance keeps a step; None: as many as the drafts earn."""
        core = llm.core
        self.core, self.sizes, self.machine, self.mean_kept = core, sizes, machine, mean_kept
        dtype = getattr(torch, core.config.model.dtype)
        self.model = StepModel.of(Path(core.facts.path), dtype, core.spec_tokens)
        self.results: dict[str, Any] = {}
        self._random = random.Random(seed)
        self._factory = RequestFactory(seed)
        known = core.facts.name == MUST_MODEL and torch.cuda.is_available()
        known = known and torch.cuda.get_device_name() == MUST_DEVICE
        self._must = {} if not known else MUST if core.spec_tokens else MUST_PLAIN

    # running requests

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN, self.core.vocab_size) for _ in range(num_tokens)]

    def ask(self, prompt: list[int], num_tokens: int, asked: float | None = None) -> Timed:
        """Queue a greedy request of exactly `num_tokens` tokens."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        timed = Timed(self._factory.split(prompt, params)[0], asked or time.perf_counter())
        self.core.add_request(timed.request)
        return timed

    def step(self, live: dict[str, Timed]) -> None:
        for output in self.core.step():
            timed = live[output.request_id]
            timed.add(output, time.perf_counter())
            if timed.ended:
                del live[output.request_id]

    def run(self, prompts: Sequence[list[int]], num_tokens: int) -> list[Timed]:
        """All at once, to their end."""
        requests = [self.ask(prompt, num_tokens) for prompt in prompts]
        live = {timed.request.request_id: timed for timed in requests}
        while live or self.core.has_work():
            self.step(live)
        assert all(len(timed.token_ids) == num_tokens for timed in requests)
        return requests

    # figures

    def decode(self) -> None:
        """Tokens a second: each row's tokens after its first, over the time from the last first token to the end."""
        sizes = self.sizes
        for rows in sizes.concurrency:
            rates, strict, before = [], [], self.core.stats()
            for run in range(sizes.runs + 1):
                timed = self.run([self.prompt(sizes.prompt_tokens) for _ in range(rows)], sizes.output_tokens)
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
        times = [self.run([self.prompt(num_tokens)], 1)[0].ttft for _ in range(self.sizes.runs + 1)][1:]
        ceiling = num_tokens / self.model.prefill_seconds(self.machine, num_tokens)
        self.report("prefill", [num_tokens / seconds for seconds in times], ceiling, "tok/s", num_tokens=num_tokens)

    def ttft(self) -> None:
        """Milliseconds to the first token: a new prompt, the same again, and its next turn."""
        sizes = self.sizes
        kinds = ("ttft cold", "ttft again", "ttft next turn")
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for run in range(sizes.runs + 1):
            prompt = self.prompt(sizes.ttft_tokens)
            cold = self.run([prompt], sizes.reply_tokens)[0]
            again = self.run([prompt], 1)[0]
            turn = self.run([prompt + cold.token_ids + self.prompt(sizes.next_turn_tokens)], 1)[0]
            if run:
                for kind, timed in zip(kinds, (cold, again, turn), strict=True):
                    times[kind].append(timed.ttft * 1000)
        for kind, timed in zip(kinds, (cold, again, turn), strict=True):
            num_new = len(timed.request.prompt_token_ids) - timed.num_cached_tokens
            least = self.model.prefill_seconds(self.machine, num_new, timed.num_cached_tokens)
            self.report(kind, times[kind], least * 1000, "ms", cached=timed.num_cached_tokens, new=num_new)

    def trace(self) -> None:
        """Users who talk in turns behind one system prompt; arrivals, lengths and pauses drawn from a seed."""
        talk = random.Random(1)
        users = self._users(talk)
        before, start = self.core.stats(), time.perf_counter()
        live: dict[str, Timed] = {}
        talking: dict[str, User] = {}
        done: list[Timed] = []
        while users or live:
            now = time.perf_counter() - start
            for user in [user for user in users if user.next_at <= now]:
                users.remove(user)
                timed = self.ask(user.say(), user.reply_tokens, start + user.next_at)
                live[timed.request.request_id] = timed
                talking[timed.request.request_id] = user
                done.append(timed)
            if not self.core.has_work():
                time.sleep(max(0.0, min(user.next_at for user in users) - now))
                continue
            self.step(live)
            for request_id in talking.keys() - live.keys():
                user = talking.pop(request_id)
                reply = next(t for t in reversed(done) if t.request.request_id == request_id)
                user.hear(reply.token_ids, time.perf_counter() - start)
                if user.messages:
                    users.append(user)
        self._report_trace(done, before)

    def _users(self, talk: random.Random) -> list["User"]:
        sizes, at = self.sizes, 0.0
        system, users = self.prompt(sizes.system_tokens), []
        for i in range(sizes.users):
            at += talk.expovariate(4.0)  # four new users a second
            messages = []
            for turn in range(sizes.turns):
                is_long = i % 8 == 3 and turn == 0
                most = sizes.ttft_tokens // 8
                messages.append(self.prompt(sizes.ttft_tokens if is_long else talk.randint(most // 8, most)))
            pauses = [talk.expovariate(1.0) for _ in messages]
            replies = [talk.randint(sizes.output_tokens // 4, sizes.output_tokens) for _ in messages]
            users.append(User(list(system), messages, pauses, replies, at))
        return users

    def _report_trace(self, done: list[Timed], before) -> None:
        after = self.core.stats()
        first, last = min(t.asked for t in done), max(t.seen[-1][0] for t in done)
        queried = after.prefix_cache_queries_total - before.prefix_cache_queries_total
        hits = after.prefix_cache_hits_total - before.prefix_cache_hits_total
        gaps = [b - a for t in done for (a, _), (b, _) in zip(t.seen, t.seen[1:], strict=False)]
        ttfts = [t.ttft for t in done]
        figures = {
            "users": self.sizes.users,
            "requests": len(done),
            "prompt_tokens": sum(len(t.request.prompt_token_ids) for t in done),
            "output_tokens_per_s": round(sum(len(t.token_ids) for t in done) / (last - first), 1),
            "ttft_p50_ms": round(percentile(ttfts, 50) * 1000, 2),
            "ttft_p99_ms": round(percentile(ttfts, 99) * 1000, 2),
            "gap_p50_ms": round(percentile(gaps, 50) * 1000, 2),  # between the outputs of one request
            "gap_p99_ms": round(percentile(gaps, 99) * 1000, 2),
            "hit_rate": round(hits / queried, 4) if queried else 0.0,
            "preemptions": after.num_preemptions_total - before.num_preemptions_total,
        }
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


@dataclass
class User:
    """One side of a conversation. `next_at`: seconds into the trace when the next message comes."""

    text: list[int]
    messages: list[list[int]]
    pauses: list[float]
    replies: list[int]
    next_at: float

    @property
    def reply_tokens(self) -> int:
        """Tokens asked for in answer to what was said last."""
        return self.replies[0]

    def say(self) -> list[int]:
        """The whole conversation with the next message."""
        self.text = self.text + self.messages.pop(0)
        return self.text

    def hear(self, reply: list[int], now: float) -> None:
        self.text = self.text + reply
        self.replies.pop(0)
        self.next_at = now + self.pauses.pop(0)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)] if ranked else 0.0
