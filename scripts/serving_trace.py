"""The multi-turn trace in process: users who talk behind one system prompt, over an engine stepped by hand."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stepped_engine import SteppedEngine, Timed

from mambalign.engine.bench_figures import percentile
from mambalign.engine.bench_traffic import Talk
from mambalign.engine.messages import EngineStats


@dataclass
class User:
    """One side of a conversation."""

    talk: Talk
    text: list[int]  # so far
    messages: list[list[int]]  # to be said
    next_at: float  # seconds into the trace when the next one comes
    num_said: int = 0

    def say(self) -> list[int]:
        """The whole conversation with the next message."""
        self.text = self.text + self.messages[self.num_said]
        self.num_said += 1
        return self.text

    @property
    def reply_tokens(self) -> int:
        """Tokens asked for in answer to what was said last."""
        return self.talk.turns[self.num_said - 1].reply_tokens

    @property
    def is_done(self) -> bool:
        return self.num_said == len(self.messages)

    def hear(self, reply: list[int], now: float) -> None:
        self.text = self.text + reply
        self.next_at = now + self.talk.turns[self.num_said - 1].pause


def play_trace(engine: SteppedEngine, talks: Sequence[Talk], system_tokens: int) -> dict[str, Any]:
    """Run the talks to their end behind a system prompt of so many tokens; the figures."""
    system = engine.prompt(system_tokens)
    users = [
        User(talk, list(system), [engine.prompt(turn.message_tokens) for turn in talk.turns], talk.starts_at)
        for talk in talks
    ]
    before, start = engine.core.stats(), time.perf_counter()
    live: dict[str, Timed] = {}
    talking: dict[str, tuple[User, Timed]] = {}
    done: list[Timed] = []
    while users or live:
        now = time.perf_counter() - start
        for user in [user for user in users if user.next_at <= now]:
            users.remove(user)
            text = user.say()
            timed = engine.ask(text, user.reply_tokens, start + user.next_at)
            live[timed.request.request_id] = timed
            talking[timed.request.request_id] = user, timed
            done.append(timed)
        if not engine.core.has_work():
            time.sleep(max(0.0, min(user.next_at for user in users) - now))
            continue
        engine.step(live)
        for request_id in talking.keys() - live.keys():
            user, timed = talking.pop(request_id)
            user.hear(timed.token_ids, time.perf_counter() - start)
            if not user.is_done:
                users.append(user)
    return {"users": len(talks)} | trace_figures(done, before, engine.core.stats())


def trace_figures(done: list[Timed], before: EngineStats, after: EngineStats) -> dict[str, Any]:
    first, last = min(t.asked for t in done), max(t.seen[-1][0] for t in done)
    queried = after.prefix_cache_queries_total - before.prefix_cache_queries_total
    hits = after.prefix_cache_hits_total - before.prefix_cache_hits_total
    gaps = [later - earlier for t in done for (earlier, _), (later, _) in pairwise(t.seen)]
    ttfts = [t.ttft for t in done]
    return {
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
