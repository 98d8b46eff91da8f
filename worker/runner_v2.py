"""Model runner V2: slots and device-side decisions, so that a step can be launched before the last one's results.

The host says which rows run, how many tokens each, and which blocks they hold; how far a decode row is, where its
live state lies and which tokens it runs, only the device knows. Results come back through `PendingStep`, one step
late. On a CPU the forward pass is the host's own and reads these numbers where it runs.
"""

from dataclasses import dataclass

import torch

from mambalign.worker.batch import CopyTotals, RowResult, RunnerOutput, ScheduledRow, SchedulerOutput
from mambalign.worker.fused_copy_check import FusedCopyChecker
from mambalign.worker.mamba_columns import table_width
from mambalign.worker.mamba_utils import MambaSpecDecodeGPUContext, preprocess_mamba
from mambalign.worker.model_step import ModelStep, StepRow
from mambalign.worker.mtp import MtpProposer
from mambalign.worker.ngram import propose_ngrams
from mambalign.worker.runner_v1 import RunnerLimits
from mambalign.worker.slot_batch import NO_TOKEN, SlotBatch
from mambalign.worker.state_cache import StateCache


@dataclass(frozen=True)
class PendingStep:
    """A launched step. `result` waits for it."""

    output: RunnerOutput

    def result(self) -> RunnerOutput:
        return self.output


class ModelRunnerV2:
    """Runs steps for `limits.max_num_seqs` requests at most; owns the slots, the cache's contents and the drafts."""

    def __init__(self, model, cache: StateCache, limits: RunnerLimits):
        self.cache = cache
        self.num_spec_tokens = limits.num_spec_tokens
        self.spec_method = limits.spec_method
        width = table_width(limits.max_model_len, cache.mamba_block_tokens, limits.num_spec_tokens)
        self.align_ctx = MambaSpecDecodeGPUContext(cache, limits.max_num_seqs, width)
        history_len = limits.max_model_len + limits.num_spec_tokens + 1 if limits.spec_method == "ngram" else 0
        self.batch = SlotBatch(self.align_ctx, limits.max_num_seqs, limits.num_spec_tokens, history_len)
        mtp = MtpProposer(model, cache, limits.num_spec_tokens) if limits.spec_method == "mtp" else None
        self.step = ModelStep(model, cache, mtp)
        self.checker = FusedCopyChecker(cache, limits.check_fused_copy_rate) if limits.check_fused_copy_rate else None

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> PendingStep:
        """Launch one step; results come in the order of `scheduled.rows`."""
        batch, rows = self.batch, scheduled.rows
        for request_id in scheduled.removed:
            batch.remove(request_id)
        for new in scheduled.new_rows:
            batch.add(new)
        idx_mapping = batch.to_device([batch.slot_of[row.request_id] for row in rows], torch.int32)
        slots = idx_mapping.long()
        batch.set_block_tables(slots, [row.mamba_blocks for row in rows])
        moved = preprocess_mamba(
            scheduled, batch, self.cache, align_ctx=self.align_ctx, idx_mapping=idx_mapping, checker=self.checker
        )
        step_rows = self._step_rows(rows, slots)
        hidden = self.step.forward(step_rows)
        tokens, logprobs = self.step.sample(step_rows, hidden)
        self._postprocess(idx_mapping, step_rows, tokens)
        drafts = self._propose(step_rows, slots, hidden, tokens)
        num_drafts = [sum(t != NO_TOKEN for t in row.token_ids[1:]) if row.is_decode else 0 for row in step_rows]
        answers = zip(rows, tokens, logprobs, drafts, num_drafts, strict=True)
        results = [RowResult(row.request_id, *answer) for row, *answer in answers]
        return PendingStep(RunnerOutput(results, moved.mismatches))

    def copy_totals(self) -> CopyTotals:
        """State copies since start; reads the device."""
        batch = self.batch
        return CopyTotals(*batch.precopy_totals.tolist(), int(batch.num_postcopies))

    def _step_rows(self, rows: list[ScheduledRow], slots: torch.Tensor) -> list[StepRow]:
        """Read what the host's forward pass needs to know of each row."""
        batch = self.batch
        computed, column = batch.num_computed[slots].tolist(), batch.running_column[slots].tolist()
        accepted, drafts = batch.num_accepted[slots].tolist(), batch.drafts[slots].tolist()
        next_token, step_rows = batch.next_token[slots].tolist(), []
        for i, (row, slot) in enumerate(zip(rows, slots.tolist(), strict=True)):
            assert row.is_decode or row.num_computed_tokens == computed[i]
            token_ids = [next_token[i], *drafts[i][: row.num_tokens - 1]] if row.is_decode else row.token_ids
            step_rows.append(StepRow(row, batch.requests[slot], token_ids, computed[i], column[i], accepted[i]))
        return step_rows

    def _postprocess(self, idx_mapping: torch.Tensor, rows: list[StepRow], tokens: list[list[int]]) -> None:
        """Keep crossed boundaries, and advance every slot by what the step made final."""
        batch, slots = self.batch, idx_mapping.long()
        kept = [len(t) if row.is_decode else 0 for row, t in zip(rows, tokens, strict=True)]
        final = [k or row.num_tokens for row, k in zip(rows, kept, strict=True)]
        num_kept, num_final = batch.to_device(kept, torch.int32), batch.to_device(final, torch.int32)
        self.align_ctx.run_fused_postprocess(
            len(rows), num_kept=num_kept, num_computed=batch.num_computed, idx_mapping=idx_mapping
        )
        size = self.align_ctx.block_tokens
        before = batch.num_computed[slots]
        after = before + num_final
        batch.num_computed[slots] = after
        for row, new_tokens in zip(rows, tokens, strict=True):
            row.request.output_token_ids.extend(new_tokens)
        batch.num_postcopies += ((after // size > before // size) & (num_kept > 0)).sum()

    def _propose(
        self, rows: list[StepRow], slots: torch.Tensor, hidden: torch.Tensor, tokens: list[list[int]]
    ) -> list[list[int]]:
        """Write each sampled row's next token and drafts into its slot; also returns the drafts."""
        batch, k = self.batch, self.num_spec_tokens
        sampled = [i for i, kept in enumerate(tokens) if kept]
        if sampled:
            batch.next_token[slots[sampled]] = batch.to_device([tokens[i][-1] for i in sampled], torch.int64)
        if self.step.mtp is not None:
            drafts = self.step.propose_mtp(rows, hidden, tokens)
        elif self.spec_method == "ngram":
            drafts = self._propose_ngrams(rows, slots, tokens)
        else:
            return [[] for _ in rows]
        filled = [each + [NO_TOKEN] * (k - len(each)) for each in drafts]
        batch.drafts[slots] = batch.to_device(filled, torch.int64)
        return drafts

    def _propose_ngrams(self, rows: list[StepRow], slots: torch.Tensor, tokens: list[list[int]]) -> list[list[int]]:
        """Add the step's tokens to the histories on the device, and look their endings up there."""
        batch = self.batch
        where = [
            (i, row.num_computed_tokens + (1 if row.is_decode else row.num_tokens) + j, token)
            for i, (row, kept) in enumerate(zip(rows, tokens, strict=True))
            for j, token in enumerate(kept)
        ]
        if not where:
            return [[] for _ in rows]
        at_row, position, token = batch.to_device(list(zip(*where, strict=True)), torch.int64)
        batch.history[slots[at_row], position] = token
        lengths = batch.num_computed[slots] + 1  # the last sampled token is not computed yet
        drafts = propose_ngrams(batch.history[slots], lengths, self.num_spec_tokens).tolist()
        return [[t for t in each if t != NO_TOKEN] if kept else [] for each, kept in zip(drafts, tokens, strict=True)]
