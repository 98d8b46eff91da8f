"""Model runner V1: a persistent batch in batch order, decisions on the CPU, results read back each step.

The simple one, and the reference for V2. A step: take over the scheduler's changes, move states (`preprocess_mamba`),
forward, sample and verify drafts, keep boundary states (`postprocess_mamba`), draft for the next step.
"""

from dataclasses import dataclass

import torch

from mambalign.worker.batch import CopyTotals, RowResult, RunnerOutput, ScheduledRow, SchedulerOutput
from mambalign.worker.fused_copy_check import FusedCopyChecker
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import table_width
from mambalign.worker.mamba_utils import MambaSpecDecodeGPUContext, postprocess_mamba, preprocess_mamba
from mambalign.worker.model_step import ModelStep, StepRow
from mambalign.worker.mtp import MtpProposer
from mambalign.worker.ngram import NgramIndex
from mambalign.worker.state_cache import StateCache


@dataclass(frozen=True)
class RunnerLimits:
    max_num_seqs: int
    max_model_len: int
    num_spec_tokens: int
    spec_method: str | None  # "mtp" or "ngram"; None without drafts
    check_fused_copy_rate: float = 0.0  # share of steps whose pre-copy is checked against the scalar path


class ModelRunnerV1:
    """Runs steps for `limits.max_num_seqs` requests at most; owns the batch, the cache's contents and the drafts."""

    def __init__(self, model, cache: StateCache, limits: RunnerLimits):
        self.cache = cache
        self.num_spec_tokens = limits.num_spec_tokens
        width = table_width(limits.max_model_len, cache.mamba_block_tokens, limits.num_spec_tokens)
        self.batch = InputBatch(limits.max_num_seqs, width, cache.mamba_block_tokens)
        self.align_ctx = MambaSpecDecodeGPUContext(cache, limits.max_num_seqs, width)
        mtp = MtpProposer(model, cache, limits.num_spec_tokens) if limits.spec_method == "mtp" else None
        self.step = ModelStep(model, cache, mtp)
        self.checker = FusedCopyChecker(cache, limits.check_fused_copy_rate) if limits.check_fused_copy_rate else None
        self._totals = CopyTotals()
        self.ngrams: dict[str, NgramIndex] | None = {} if limits.spec_method == "ngram" else None

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> RunnerOutput:
        """Run one step. Puts `scheduled.rows` into batch order; results come in that order."""
        self._take_over(scheduled)
        moved = preprocess_mamba(
            scheduled, self.batch, self.cache, align_ctx=self.align_ctx, checker=self.checker
        )
        rows = [self._step_row(row) for row in scheduled.rows]
        hidden = self.step.forward(rows)
        tokens, logprobs = self.step.sample(rows, hidden)
        num_kept = [len(t) if row.is_decode else row.num_tokens for row, t in zip(rows, tokens, strict=True)]
        num_postcopies = postprocess_mamba(scheduled, num_kept, self.batch, self.cache, align_ctx=self.align_ctx)
        for row, kept in zip(rows, tokens, strict=True):
            row.request.output_token_ids.extend(kept)
        drafts = self._propose(rows, hidden, tokens)
        num_drafts = [row.num_tokens - 1 if row.is_decode else 0 for row in rows]
        answers = zip(scheduled.rows, tokens, logprobs, drafts, num_drafts, strict=True)
        results = [RowResult(row.request_id, *answer) for row, *answer in answers]
        self._totals = self._totals.plus(moved.num_rows, moved.num_biased_rows, num_postcopies)
        return RunnerOutput(results, moved.mismatches)

    def copy_totals(self) -> CopyTotals:
        """State copies since start."""
        return self._totals

    def _take_over(self, scheduled: SchedulerOutput) -> None:
        for request_id in scheduled.removed:
            self.batch.remove(request_id)
            if self.ngrams is not None:
                del self.ngrams[request_id]
        for new in scheduled.new_rows:
            self.batch.add(new)
            if self.ngrams is not None:
                self.ngrams[new.request_id] = NgramIndex()
                self.ngrams[new.request_id].extend(new.token_ids)
        scheduled.rows.sort(key=lambda row: self.batch.row_of[row.request_id])

    def _step_row(self, row: ScheduledRow) -> StepRow:
        at, batch = self.batch.row_of[row.request_id], self.batch
        column, accepted = int(batch.mamba_state_idx[at]), int(batch.num_accepted[at])
        return StepRow(row, batch.requests[at], row.token_ids, row.num_computed_tokens, column, accepted)

    def _propose(self, rows: list[StepRow], hidden: torch.Tensor, tokens: list[list[int]]) -> list[list[int]]:
        if self.ngrams is not None:
            return [self._propose_ngram(row, kept) for row, kept in zip(rows, tokens, strict=True)]
        if self.step.mtp is not None:
            return self.step.propose_mtp(rows, hidden, tokens)
        return [[] for _ in rows]

    def _propose_ngram(self, row: StepRow, kept: list[int]) -> list[int]:
        index = self.ngrams[row.request.request_id]
        index.extend(kept)
        return index.propose(self.num_spec_tokens) if kept else []
