"""The real scheduler, pools and prefix cache against the symbolic runner, over random lives of an engine.

MAMBALIGN_SIMULATION_SEEDS sets the number of seeds of each kind (default: some seconds on one core).
"""

import os
import random
from collections import Counter

import pytest

from mambalign.engine.scheduler_limits import SchedulerLimits
from mambalign.engine.tests.symbolic_engine import VOCAB_SIZE, SymbolicEngine
from mambalign.worker.mamba_columns import cdiv
from mambalign.worker.tests.symbolic_runner import DraftPlan

NUM_SEEDS = int(os.environ.get("MAMBALIGN_SIMULATION_SEEDS", "700"))
NUM_REQUESTS = 8


def draw_limits(rng: random.Random, pools: str) -> SchedulerLimits:
    """`pools`: "tiny" is the smallest that start-up allows, "small" a few blocks more, "big" never evicts."""
    spec, kv_size = rng.randint(0, 8), rng.choice([1, 2, 4])
    smallest = cdiv(spec + 1, kv_size)
    block = kv_size * rng.choice([smallest, smallest, smallest + 1, 2 * smallest, 2 * smallest + 3])
    lookahead = rng.choice([0, max(1, spec)])
    max_len = rng.randint(block + 2, 3 * block + 20)
    num_kv, num_mamba = cdiv(max_len + lookahead, kv_size), max(spec + 2, 5)
    max_seqs = rng.randint(1, 5)
    chunk = rng.choice([None, None, *(size for size in (2, 3, 4, 8, 12) if block % size == 0)])
    num_columns = cdiv(max_len, block) + spec + 3
    extra_kv = {"tiny": 0, "small": rng.randint(1, 3 * num_kv), "big": 2 * NUM_REQUESTS * num_kv}[pools]
    extra_mamba = {"tiny": 0, "small": rng.choice([2, num_mamba]), "big": 2 * NUM_REQUESTS * num_columns}[pools]
    return SchedulerLimits(
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max_seqs - 1 + (chunk or 1) + rng.choice([0, rng.randint(0, 2 * block), 200]),
        max_model_len=max_len,
        num_spec_tokens=spec,
        kv_block_tokens=kv_size,
        mamba_block_tokens=block,
        num_kv_blocks=1 + num_kv + extra_kv,
        num_mamba_blocks=1 + num_mamba + extra_mamba,
        enable_prefix_caching=rng.random() < 0.85,
        num_lookahead_tokens=lookahead,
        schedules_ahead=rng.random() < 0.5,
        chunk_tokens=chunk,
    )


def plan_drafts(rng: random.Random, limits: SchedulerLimits) -> DraftPlan:
    """A drafter gives all its drafts, n-grams sometimes none; how many are right follows the seed's own taste."""
    always, taste = limits.num_lookahead_tokens > 0, rng.random()

    def plan(request_id: str, num_tokens: int) -> tuple[int, int]:
        num_drafts = limits.num_spec_tokens
        if not always:
            num_drafts = rng.choice([0, num_drafts, rng.randint(0, num_drafts)])
        return num_drafts, num_drafts if rng.random() < taste else rng.randint(0, num_drafts)

    return plan


class Life:
    """Random requests, whose prompts grow out of each other, come, end and are aborted between steps."""

    def __init__(self, seed: int, pools: str):
        self.rng = rng = random.Random(seed)
        limits = draw_limits(rng, pools)
        self.engine = SymbolicEngine(limits, plan_drafts(rng, limits), conv_width=rng.randint(2, 4))
        self.salts = rng.choice([[""], ["", "a"]])
        self.abort_rate, self.reset_rate = rng.choice([0, 0.03]), rng.choice([0, 0, 0.03])
        self.num_to_come = rng.randint(1, NUM_REQUESTS)

    def draw_prompt(self) -> list[int]:
        """A piece of an earlier text, often cut at a block's edge, and often something new behind it."""
        rng, limits = self.rng, self.engine.limits
        prompt: list[int] = []
        if self.engine.requests and rng.random() < 0.8:
            earlier = rng.choice(self.engine.requests)
            text = rng.choice([earlier.prompt_token_ids, earlier.token_ids])
            near = rng.randint(0, 4) * limits.mamba_block_tokens + rng.randint(-1, 1)
            prompt = text[: rng.choice([len(text), near, rng.randint(0, len(text))])] if near > 0 else list(text)
        if not prompt or rng.random() < 0.6:
            length = rng.choice([limits.mamba_block_tokens + rng.randint(-1, 1), rng.randint(1, limits.max_model_len)])
            prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(max(1, length))]
        return prompt[: limits.max_model_len - 1]

    def add(self) -> None:
        rng, size = self.rng, self.engine.limits.mamba_block_tokens
        self.num_to_come -= 1
        prompt, options = self.draw_prompt(), {"seed": rng.randrange(2), "salt": rng.choice(self.salts)}
        options |= {"stop_after": rng.choice([None, rng.randint(1, 3 * size)]), "needs_host": rng.random() < 0.1}
        for choice in range(rng.choice([1, 1, 1, 2])):
            self.engine.add(prompt, rng.randint(1, 3 * size), choice=choice, **options)

    def run(self) -> SymbolicEngine:
        rng, engine = self.rng, self.engine
        while self.num_to_come or engine.has_work():
            while self.num_to_come and (not engine.has_work() or rng.random() < 0.2):
                self.add()
            engine.step()
            if rng.random() < self.abort_rate:
                engine.abort(rng.choice(engine.requests))
            if rng.random() < self.reset_rate:
                engine.reset_prefix_cache()
            assert engine.num_steps < 5000, "no end in sight"
        engine.check_idle()
        return engine


@pytest.mark.parametrize("pools", ["tiny", "small", "big"])
def test_every_life_is_right(pools: str) -> None:
    engines = [Life(seed, pools).run() for seed in range(NUM_SEEDS)]
    counters = [engine.scheduler.counters for engine in engines]
    assert sum(c.accepted_tokens for c in counters) > NUM_SEEDS
    assert sum(c.prefix_hits for c in counters) > NUM_SEEDS
    assert sum(e.runner.num_biased_precopies for e in engines) > NUM_SEEDS / 10
    assert sum(e.runner.num_postcopies for e in engines) > NUM_SEEDS
    turns = sum((e.runner.turns for e in engines), Counter())
    assert len(turns) == 4 and min(turns.values()) > NUM_SEEDS / 4, turns
    assert sum(e.num_steps_ahead for e in engines) > sum(e.num_steps for e in engines) / 5
    if pools == "big":
        assert not any(e.num_evictions for e in engines) and not any(c.preemptions for c in counters)
    else:
        assert sum(c.preemptions for c in counters) > NUM_SEEDS / 10
        assert sum(e.num_evictions for e in engines) > NUM_SEEDS
        assert sum(e.num_replayed for e in engines) > NUM_SEEDS / 20
