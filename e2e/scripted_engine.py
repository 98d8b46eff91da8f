"""A real engine whose drafts are written down beforehand: how many follow each step, and how many of them are right.

The proposer still runs (it fills its slots); only what it proposes is replaced. What each step did to the states is
read off their bytes: which column changed, before the forward pass and after sampling, and which one it now equals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from asks import Ask
from local_client import LocalClient
from oracle import Oracle

from mambalign.engine.request import Request
from mambalign.worker.batch import ScheduledRow, SchedulerOutput
from mambalign.worker.forward_batch import NO_TOKEN, StepRows
from mambalign.worker.sampling_params import SamplingParams


class Drafts(NamedTuple):
    """What follows one step of a row: `num_drafts`, of which the first `num_right` are the true text."""

    num_drafts: int
    num_right: int


class Copy(NamedTuple):
    """A temporal state that was copied from one column of a row to another."""

    source_column: int
    dest_column: int


@dataclass(frozen=True)
class Step:
    """One step of a row: q tokens from position n, the columns held, the copies before the pass and after sampling.

    A copy that leaves no trace, onto its own source, is None.
    """

    n: int
    q: int
    held: list[int]
    before: Copy | None = None
    after: Copy | None = None


@dataclass(frozen=True)
class SeenStep:
    """One step of a row as it was seen; of the copies, every one that would explain the bytes (None: no copy)."""

    n: int
    q: int
    held: list[int]
    before: set[Copy | None]
    after: set[Copy | None]


Snapshot = dict[str, dict[int, torch.Tensor]]  # request id -> column -> bytes


class ScriptedEngine:
    """Runs one request or several, each with its script; at its end a row gets full drafts that are all right."""

    def __init__(self, oracle: Oracle, **options: Any):
        self.oracle = oracle
        self.client = LocalClient(spec_method="mtp", check_fused_copy=True, **options)
        self.core = self.client.core
        self.cache = self.core.runner.cache
        self.block_tokens = self.cache.mamba_block_tokens
        self.steps: dict[tuple[int, ...], list[SeenStep]] = {}  # of the last run, by prompt
        self._scripts: dict[tuple[int, ...], list[Drafts]] = {}
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self._num_samples: dict[str, int] = {}
        self._snapshots: list[Snapshot] = []
        self._hook()

    def _hook(self) -> None:
        runner = self.core.runner
        execute, forward, sample, propose = (
            runner.execute_model,
            runner.step.forward,
            runner.step.sample,
            runner.step.propose_mtp,
        )

        def execute_model(scheduled: SchedulerOutput) -> Any:
            self._rows = scheduled.rows  # V1 puts them into batch order, in place
            self._snapshots = [self._snapshot(scheduled.rows)]
            result = execute(scheduled)
            self._record(scheduled.rows)
            return result

        def watched_forward(rows: StepRows) -> torch.Tensor:
            self._computed = rows.num_computed.tolist()
            self._snapshots.append(self._snapshot(self._rows))
            return forward(rows)

        def watched_sample(*args: Any) -> Any:
            self._snapshots.append(self._snapshot(self._rows))
            return sample(*args)

        def scripted_propose(
            rows: StepRows, hidden: torch.Tensor, sampled: torch.Tensor, num_final: torch.Tensor
        ) -> torch.Tensor:
            drafts = torch.full_like(propose(rows, hidden, sampled, num_final), NO_TOKEN)
            lengths = (rows.num_computed + num_final + 1).tolist()
            for i, (row, length) in enumerate(zip(self._rows, lengths, strict=True)):
                if row.num_samples:
                    scripted = self._drafts(self._prompt(row), row.request_id, length)
                    drafts[i, : len(scripted)] = torch.tensor(scripted, dtype=torch.int64)
            return drafts

        runner.execute_model = execute_model
        runner.step.forward, runner.step.sample, runner.step.propose_mtp = (
            watched_forward,
            watched_sample,
            scripted_propose,
        )

    def _snapshot(self, rows: Sequence[ScheduledRow]) -> Snapshot:
        temporal = self.cache.temporal[0]
        return {
            row.request_id: {
                column: temporal[block].view(torch.int32).clone() for column, block in row.mamba_blocks.items()
            }
            for row in rows
        }

    def _record(self, rows: Sequence[ScheduledRow]) -> None:
        start, before_pass, after_pass = self._snapshots
        end = self._snapshot(rows)
        for row, n in zip(rows, self._computed, strict=True):
            name, held = row.request_id, sorted(row.mamba_blocks)
            before = explanations(start[name], before_pass[name])
            after = explanations(after_pass[name], end[name])
            step = SeenStep(n, row.num_tokens, held, before, after)
            self.steps.setdefault(self._prompt(row), []).append(step)

    def _prompt(self, row: ScheduledRow) -> tuple[int, ...]:
        return tuple(self.core.scheduler.requests[row.request_id].prompt_token_ids)

    def _drafts(self, prompt: tuple[int, ...], name: str, num_tokens: int) -> list[int]:
        """What follows the first `num_tokens` of the text, by the script."""
        at = self._num_samples.get(name, 0)
        self._num_samples[name] = at + 1
        script, most = self._scripts[prompt], self.core.spec_tokens
        num_drafts, num_right = script[at] if at < len(script) else Drafts(most, most)
        num_output = num_tokens - len(prompt)
        true = self._texts[prompt][num_output : num_output + num_drafts]
        vocab_size = self.core.vocab_size
        return [token if i < num_right else (token + 1) % vocab_size for i, token in enumerate(true)]

    def run(self, prompts: Sequence[list[int]], scripts: Sequence[list[Drafts]], num_tokens: int) -> None:
        """Run all at once, from an empty cache, and check the texts; `num_tokens` is more than any script brings."""
        beyond = self.core.spec_tokens + 1  # drafts reach past the end of what is asked for
        texts = [self.oracle.expected(prompt, num_tokens + beyond).token_ids for prompt in prompts]
        self.write(prompts, scripts, texts)
        asks = [Ask(prompt, num_tokens, logprobs=True) for prompt in prompts]
        for ask, answer in zip(asks, self.client.run(asks), strict=True):
            (choice,) = answer.choices
            self.oracle.assert_text(ask.prompt, choice.token_ids, choice.logprobs, f"script {self._scripts}")
        self.client.assert_idle()

    def write(self, prompts: Sequence[list[int]], scripts: Sequence[list[Drafts]], texts: Sequence[list[int]]) -> None:
        """Empty the cache, and let these scripts and true texts hold for the next that is asked about the prompts."""
        self.client.reset_prefix_cache()
        self._scripts = {tuple(prompt): script for prompt, script in zip(prompts, scripts, strict=True)}
        self._texts = {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}
        self.steps, self._num_samples = {}, {}

    def cached_state(self, token_ids: Sequence[int]) -> list[torch.Tensor] | None:
        """Bytes of every state that the cache holds after exactly these tokens; None if it holds none."""
        request, pool = Request("", list(token_ids), SamplingParams()), self.core.scheduler.blocks.mamba_pool
        self.core.scheduler.blocks.cache.extend_hashes(request)
        block = pool.lookup(self.core.scheduler.blocks.cache.state_hash(request, len(token_ids)))
        if block is None:
            return None
        window = self.cache.conv_width - 1
        is_ds = self.cache.conv_layout == "DS"
        conv = [state[block, :, :window] if is_ds else state[block, :window] for state in self.cache.conv]
        states = [*conv, *(state[block] for state in self.cache.temporal), self.cache.carry[block]]
        return [state.contiguous().view(torch.int32).clone() for state in states]


def explanations(before: dict[int, torch.Tensor], after: dict[int, torch.Tensor]) -> set[Copy | None]:
    """Every copy from one column to another that makes a row's bytes `after` of those `before`."""
    changed = [column for column in after if not torch.equal(before[column], after[column])]
    assert len(changed) <= 1, f"columns {changed} changed"
    copies: set[Copy | None] = set() if changed else {None}
    for dest in changed or after:
        copies |= {Copy(k, dest) for k in before if k != dest and torch.equal(before[k], after[dest])}
    assert copies, f"column {changed} holds what no column held"
    return copies
