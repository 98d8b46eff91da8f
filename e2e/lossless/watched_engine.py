"""A real engine in this process with everything that can be watched watched, at every step."""

from collections import Counter
from copy import copy
from unittest import mock

import torch
from late_engine import LateRunner, poison_handed_out
from local_client import Poison, pool_tensors
from lossless.plan import Setup
from lossless.published_memory import PublishedMemory
from lossless.scripted_drafts import DraftsOf, script_drafts
from lossless.truth import truth_of

from mambalign.engine.config import EngineConfig
from mambalign.engine.core import EngineCore
from mambalign.engine.messages import EngineOutput
from mambalign.engine.request import Request
from mambalign.worker.batch import RowResult, RunnerOutput, SchedulerOutput
from mambalign.worker.forward_batch import ForwardBatch
from mambalign.worker.mamba_columns import NULL_BLOCK
from mambalign.worker.mamba_utils import MambaSpecDecodeGPUContext
from mambalign.worker.model_step import ModelStep
from mambalign.worker.state_cache import StateCache


class WatchedEngine:
    """Books checked and free blocks filled with NaN after each step. Counts for itself what metrics also count."""

    def __init__(self, setup: Setup, drafts_of: DraftsOf):
        truth = truth_of(setup.model)
        config = EngineConfig.from_options(model=str(truth.path), **setup.options(truth.model))
        with mock.patch("mambalign.engine.core.load_model", return_value=truth.model):
            self.core = EngineCore(config)
        self.setup, scheduler = setup, self.core.scheduler
        if setup.scripted and setup.spec_tokens:
            script_drafts(self.core.runner, drafts_of)
        pools = pool_tensors(self.core)
        self.published = PublishedMemory(self.core, truth, pools)
        self._null_blocks = [tensor[NULL_BLOCK].fill_(torch.nan) for _, tensors in pools for tensor in tensors]
        self._poison: Poison | None = None
        if setup.late:
            self.core.runner = LateRunner(self.core.runner)
            for pool, tensors in pools:
                poison_handed_out(self.core.runner, pool, tensors, lambda block: None)
        else:
            self._poison = Poison(self.core)
            self._poison.spread()
        self.moves: Counter[int] = Counter()  # rows whose state moved before a pass, by token bias
        self._count_moves(self.core.runner.align_ctx)
        self.num_replays = 0  # kept drafts that were run again, from the inputs that they left
        self._count_replays(self.core.runner.step)
        self.hits: dict[str, int] = {}  # request -> cached tokens of its first admission
        self.num_drafts = self.num_accepted = self.num_drafted_rows = self.num_cut_rows = self.num_discarded = 0
        self.accepted_at = [0] * setup.spec_tokens
        self.drafts_of_request: dict[str, tuple[int, int]] = {}  # verified, kept
        self.num_preemptions = self.num_steps = self.num_ahead = 0
        self._schedule, scheduler.schedule = scheduler.schedule, self._watched_schedule
        self._update, scheduler.update = scheduler.update, self._watched_update
        self._preempt, scheduler._preempt = scheduler._preempt, self._watched_preempt

    def step(self) -> list[EngineOutput]:
        outputs = self.core.step()
        self.num_steps += 1
        self.core.check()
        self.published.check_unchanged()
        if self._poison is not None:
            self._poison.spread()
        return outputs

    def _count_moves(self, ctx: MambaSpecDecodeGPUContext) -> None:
        run = ctx.run_fused_precopy

        def counted(num_reqs: int, *, idx_mapping: torch.Tensor | None = None) -> None:
            slots = torch.arange(num_reqs) if idx_mapping is None else idx_mapping.long()
            self.moves.update(move.token_bias for move in ctx.read_decisions(slots) if move.source_column >= 0)
            run(num_reqs, idx_mapping=idx_mapping)

        ctx.run_fused_precopy = counted

    def _count_replays(self, step: ModelStep) -> None:
        forward = step.model.forward

        def counted(batch: ForwardBatch, cache: StateCache) -> torch.Tensor:
            self.num_replays += int(batch.mamba.deferral.num_replays.sum())
            return forward(batch, cache)

        step.model = copy(step.model)  # other engines run the same one
        step.model.forward = counted

    def _watched_schedule(self) -> SchedulerOutput:
        scheduled = self._schedule()
        self.num_ahead += bool(scheduled.rows and self.core._launched)
        for new in scheduled.new_rows:
            self.hits.setdefault(new.request_id, new.num_computed_tokens)
        return scheduled

    def _watched_preempt(self, request: Request) -> None:
        assert not self.core._launched, "preempted with a step in flight"
        self.num_preemptions += 1
        self._preempt(request)

    def _watched_update(
        self, scheduled: SchedulerOutput, output: RunnerOutput
    ) -> list[tuple[Request, list[int], RowResult]]:
        rows = {row.request_id: row for row in scheduled.rows}
        gained = self._update(scheduled, output)
        self.num_discarded += len(rows) - len(gained)
        for request, kept, result in gained:
            assert kept == result.token_ids[: len(kept)]
            if rows[request.request_id].is_decode and result.num_draft_tokens:
                is_cut = len(kept) < len(result.token_ids)  # then the last one kept was a draft too
                self._count(request.request_id, result.num_draft_tokens, len(kept) - (not is_cut))
                self.num_cut_rows += is_cut
        return gained

    def _count(self, name: str, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts <= self.setup.spec_tokens
        self.num_drafted_rows += 1
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        for position in range(num_accepted):
            self.accepted_at[position] += 1
        verified, kept = self.drafts_of_request.get(name, (0, 0))
        self.drafts_of_request[name] = (verified + num_drafts, kept + num_accepted)

    def check_idle(self) -> None:
        """Nothing is left, nothing leaked, nothing was copied wrong, nothing written where there is no block."""
        assert not self.core.has_work()
        assert all(block.isnan().all() for block in self._null_blocks), "a null block was written"
        for name, (num_free, num_usable) in self.core.free_blocks().items():
            assert num_free == num_usable, f"{name}: {num_usable - num_free} blocks leaked"
        assert self.core.stats().fused_copy_mismatches_total == 0

    def check_counters(self, num_prompt_tokens: dict[str, int], not_looked_up: set[str], num_tokens: int) -> None:
        """Metrics are what was seen. num_prompt_tokens: of each request; num_tokens: of all texts."""
        stats, admitted = self.core.stats(), self.hits.keys()
        prompts = sum(num_prompt_tokens[name] for name in admitted)
        looked_up = admitted - not_looked_up if self.setup.prefix_caching else set()
        seen = {
            "prefix_cache_queries_total": sum(num_prompt_tokens[name] for name in looked_up),
            "prefix_cache_hits_total": sum(self.hits.values()),
            "prompt_tokens_total": prompts,
            "generation_tokens_total": num_tokens,
            "num_preemptions_total": self.num_preemptions,
            "spec_decode_num_drafts_total": self.num_drafted_rows,
            "spec_decode_num_draft_tokens_total": self.num_drafts,
            "spec_decode_num_accepted_tokens_total": self.num_accepted,
            "spec_decode_accepted_per_position": self.accepted_at,
        }
        told = {name: getattr(stats, name) for name in seen}
        assert told == seen, f"metrics say {told}, what happened is {seen}"
        if self.setup.checked:
            assert Counter({int(bias): n for bias, n in stats.fused_copy_copies.items()}) == self.moves
        assert (stats.precopies_total, stats.precopies_biased_total) == (
            self.moves.total(),
            self.moves.total() - self.moves[0],
        )
        assert stats.prefix_cache_misses.get("disabled", 0) == len(admitted - looked_up)
        assert sum(stats.prefix_cache_misses.values()) == sum(hit == 0 for hit in self.hits.values())
