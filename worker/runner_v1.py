"""Model runner V1: a persistent batch in batch order, decisions on the CPU, results read back each step.

The simple one, and the reference for V2. A step: take over the scheduler's changes, move states (`preprocess_mamba`),
forward, sample and verify drafts, keep boundary states (`postprocess_mamba`), draft for the next step.
"""

import torch

from mambalign.worker.batch import CopyTotals, RowResult, RunnerOutput, ScheduledRow, SchedulerOutput
from mambalign.worker.forward_batch import NO_TOKEN, StepLayout, StepRows, lay_out
from mambalign.worker.fused_copy_check import FusedCopyChecker
from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import table_width
from mambalign.worker.mamba_utils import MambaSpecDecodeGPUContext, postprocess_mamba, preprocess_mamba
from mambalign.worker.model_step import ModelStep, RunnerLimits
from mambalign.worker.ngram import NgramIndex
from mambalign.worker.state_cache import StateCache


class ModelRunnerV1:
    """Runs steps for `limits.max_num_seqs` requests at most; owns the batch, the cache's contents and the drafts."""

    def __init__(self, model, cache: StateCache, limits: RunnerLimits, grammars: GrammarCompiler | None = None):
        self.cache = cache
        self.num_spec_tokens = limits.num_spec_tokens
        width = table_width(limits.max_model_len, cache.mamba_block_tokens, limits.num_spec_tokens)
        self.batch = InputBatch(limits.max_num_seqs, width, cache.mamba_block_tokens)
        self.align_ctx = MambaSpecDecodeGPUContext(cache, limits.max_num_seqs, width)
        self.step = ModelStep(model, cache, limits, width, grammars)
        self.checker = FusedCopyChecker(cache, limits.check_fused_copy_rate) if limits.check_fused_copy_rate else None
        self._totals = CopyTotals()
        self.ngrams: dict[str, NgramIndex] | None = {} if limits.spec_method == "ngram" else None

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> RunnerOutput:
        """Run one step. Puts `scheduled.rows` into batch order; results come in that order."""
        resumed = self._take_over(scheduled)
        checked = self.checker is not None
        moved = preprocess_mamba(
            scheduled, self.batch, self.cache, align_ctx=self.align_ctx, checker=self.checker, checked=checked
        )
        layout = lay_out(scheduled.rows, self.cache, resumed)
        rows = self._step_rows(scheduled.rows, layout)
        requests = [self.batch.requests[self.batch.row_of[row.request_id]] for row in scheduled.rows]
        hidden = self.step.forward(rows)
        of_prompts = self.step.prompt_logprobs(hidden, scheduled.rows, requests)
        output = self.step.sample(rows, self.step.logits(rows, hidden), scheduled.rows, requests)
        sampled, logprobs = output.token_ids, output.logprobs.entries()
        verified = self.step.verify(rows, sampled)
        counts = verified.num_kept.tolist()
        tokens = [ids[:count] for ids, count in zip(verified.token_ids.tolist(), counts, strict=True)]
        num_final = [k if row.is_decode else row.num_tokens for row, k in zip(scheduled.rows, counts, strict=True)]
        num_postcopies = postprocess_mamba(
            scheduled, num_final, self.batch, self.cache, align_ctx=self.align_ctx, checked=checked
        )
        for request, kept in zip(requests, tokens, strict=True):
            request.output_token_ids.extend(kept)
        drafts = self._propose(rows, hidden, sampled, num_final, scheduled.rows, tokens)
        self._totals = self._totals.plus(moved.num_rows, moved.num_biased_rows, num_postcopies)
        results, at = [], 0
        parts = (scheduled.rows, requests, tokens, drafts, of_prompts)
        for row, request, kept, new_drafts, copies in zip(*parts, strict=True):
            request.draft_token_ids = new_drafts
            of_prompt = [entry for copy in copies for entry in copy.entries()]
            wanted = request.params.logprobs is not None and kept
            num_drafts = row.num_tokens - 1 if row.is_decode else 0
            entries = logprobs[at : at + len(kept)] if wanted else None
            error = request.error_after(kept, of_prompt)
            result = RowResult(row.request_id, kept, entries, new_drafts, num_drafts, of_prompt, error)
            results.append(result)
            at += row.num_samples
        return RunnerOutput(results, moved.mismatches)

    def copy_totals(self) -> CopyTotals:
        """State copies since start."""
        return self._totals

    def _take_over(self, scheduled: SchedulerOutput) -> set[str]:
        """Returns the requests that begin behind a cached prefix."""
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
        return {new.request_id for new in scheduled.new_rows if new.num_computed_tokens}

    def _step_rows(self, rows: list[ScheduledRow], layout: StepLayout) -> StepRows:
        at, batch = [self.batch.row_of[row.request_id] for row in rows], self.batch

        def send(values) -> torch.Tensor:
            return torch.from_numpy(values).to(self.cache.device)

        return StepRows(
            layout,
            torch.tensor([row.num_computed_tokens for row in rows], dtype=torch.int32, device=self.cache.device),
            send(batch.mamba_state_idx[at]),
            send(batch.num_accepted[at]),
            send(batch.mamba_block_table[at]),
            layout.token_ids,
        )

    def _propose(
        self,
        rows: StepRows,
        hidden: torch.Tensor,
        sampled: torch.Tensor,
        num_final: list[int],
        scheduled: list[ScheduledRow],
        tokens: list[list[int]],
    ) -> list[list[int]]:
        if self.ngrams is not None:
            return [self._propose_ngram(row, kept) for row, kept in zip(scheduled, tokens, strict=True)]
        if self.step.mtp is None:
            return [[] for _ in tokens]
        final = torch.tensor(num_final, dtype=torch.int32, device=self.cache.device)
        drafts = self.step.propose_mtp(rows, hidden, sampled, final).tolist()
        return [[token for token in row if token != NO_TOKEN] for row in drafts]

    def _propose_ngram(self, row: ScheduledRow, kept: list[int]) -> list[int]:
        index = self.ngrams[row.request_id]
        index.extend(kept)
        return index.propose(self.num_spec_tokens) if kept else []
