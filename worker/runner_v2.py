"""Model runner V2: slots and device-side decisions, so that a step can be launched before the last one's results.

The host says which rows run, how many tokens each, and which blocks they hold; how far a decode row is, where its
live state lies and which tokens it runs, only the device knows. Results come back through `PendingStep`, one step
late, in one copy.
"""

import torch

from mambalign.kernels.slot_rows import advance_slots, gather_slots
from mambalign.worker.batch import CopyTotals, RowResult, RunnerOutput, ScheduledRow, SchedulerOutput
from mambalign.worker.forward_batch import NO_TOKEN, StepLayout, StepRows, lay_out
from mambalign.worker.fused_copy_check import FusedCopyChecker
from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.host_copy import HostCopy
from mambalign.worker.input_batch import CachedRequest
from mambalign.worker.logprobs import LogprobCopy
from mambalign.worker.mamba_columns import table_width
from mambalign.worker.mamba_utils import MambaSpecDecodeGPUContext, preprocess_mamba
from mambalign.worker.model_step import ModelStep, RunnerLimits, Verified
from mambalign.worker.ngram import propose_ngrams
from mambalign.worker.slot_batch import SlotBatch
from mambalign.worker.state_cache import StateCache


class PendingStep:
    """A launched step. `result` waits for it, and adds its tokens to its requests' texts."""

    def __init__(
        self,
        rows: list[ScheduledRow],
        requests: list[CachedRequest],
        numbers: torch.Tensor,
        logprobs: LogprobCopy,
        of_prompts: list[list[LogprobCopy]],
        mismatches: tuple,
    ):
        """numbers int64 [R, 2 + S+1 + S] on the device: tokens kept, drafts verified, tokens, drafts for the next."""
        self._rows, self._requests, self._logprobs, self._mismatches = rows, requests, logprobs, mismatches
        self._of_prompts = of_prompts
        self._output: RunnerOutput | None = None
        self._numbers = HostCopy(numbers)

    def result(self) -> RunnerOutput:
        if self._output is None:
            self._output = RunnerOutput(list(self._results()), self._mismatches)
        return self._output

    def _results(self):
        all_numbers, logprobs = self._numbers.wait(), self._logprobs.entries()
        width, at = (all_numbers.shape[1] - 1) // 2, 0  # S + 1
        parts = (self._rows, self._requests, all_numbers.tolist(), self._of_prompts)
        for row, request, numbers, copies in zip(*parts, strict=True):
            num_kept, num_drafts, *tokens = numbers
            kept, drafts = tokens[:num_kept], [token for token in tokens[width:] if token != NO_TOKEN]
            request.output_token_ids.extend(kept)
            request.draft_token_ids = drafts
            wanted = request.params.logprobs is not None and num_kept
            entries = logprobs[at : at + num_kept] if wanted else None
            at += row.num_samples
            of_prompt = [entry for copy in copies for entry in copy.entries()]
            error = request.error_after(kept, of_prompt)
            yield RowResult(row.request_id, kept, entries, drafts, num_drafts, of_prompt, error)


class ModelRunnerV2:
    """Runs steps for `limits.max_num_seqs` requests at most; owns the slots, the cache's contents and the drafts."""

    def __init__(self, model, cache: StateCache, limits: RunnerLimits, grammars: GrammarCompiler | None = None):
        self.cache = cache
        self.num_spec_tokens = limits.num_spec_tokens
        self.spec_method = limits.spec_method
        width = table_width(limits.max_model_len, cache.mamba_block_tokens, limits.num_spec_tokens)
        self.align_ctx = MambaSpecDecodeGPUContext(cache, limits.max_num_seqs, width)
        history_len = limits.max_model_len + limits.num_spec_tokens + 1 if limits.spec_method == "ngram" else 0
        self.batch = SlotBatch(self.align_ctx, limits.max_num_seqs, limits.num_spec_tokens, history_len)
        self.step = ModelStep(model, cache, limits, width, grammars)
        self.checker = FusedCopyChecker(cache, limits.check_fused_copy_rate) if limits.check_fused_copy_rate else None

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> PendingStep:
        """Launch one step; results come in the order of `scheduled.rows`."""
        batch, rows = self.batch, scheduled.rows
        for request_id in scheduled.removed:
            batch.remove(request_id)
        for new in scheduled.new_rows:
            batch.add(new)
        resumed = {new.request_id for new in scheduled.new_rows if new.num_computed_tokens}
        slots = [batch.slot_of[row.request_id] for row in rows]
        layout = lay_out(rows, self.cache, resumed, slots, self.align_ctx.block_table_buf.gpu.shape[2])
        batch.set_block_tables(layout.slots, layout.mamba_table)
        moved = preprocess_mamba(
            scheduled,
            batch,
            self.cache,
            align_ctx=self.align_ctx,
            idx_mapping=layout.slots,
            checker=self.checker,
            checked=self.checker is not None,
        )
        step_rows = self._step_rows(layout)
        requests = [batch.requests[slot] for slot in slots]
        hidden = self.step.forward(step_rows)
        of_prompts = self.step.prompt_logprobs(hidden, rows, requests)
        output = self.step.sample(step_rows, self.step.logits(step_rows, hidden), rows, requests)
        sampled = output.token_ids
        verified = self.step.verify(step_rows, sampled)
        if self.checker is not None:
            batch.check_kept(verified.num_kept_of_decode, layout.slots)
        self.align_ctx.run_fused_postprocess(
            len(rows),
            num_kept=verified.num_kept_of_decode,
            num_computed=batch.num_computed,
            idx_mapping=layout.slots,
        )
        drafts = self._propose(step_rows, hidden, sampled, verified)
        numbers = advance_slots(
            layout.slots,
            step_rows.num_computed,
            verified.counts,
            verified.token_ids,
            drafts,
            batch.num_computed,
            batch.next_token,
            batch.drafts,
            batch.num_postcopies,
            self.align_ctx.block_tokens,
        )
        return PendingStep(rows, requests, numbers, output.logprobs, of_prompts, moved.mismatches)

    def copy_totals(self) -> CopyTotals:
        """State copies since start; reads the device."""
        batch = self.batch
        return CopyTotals(*batch.precopy_totals.tolist(), int(batch.num_postcopies))

    def _step_rows(self, layout: StepLayout) -> StepRows:
        """Add what only the device knows: the tokens of decode rows, and where every row stands."""
        batch = self.batch
        numbers, token_ids = gather_slots(
            layout.slots,
            layout.row_of_token,
            layout.offset_of_token,
            layout.token_ids,
            batch.num_computed,
            batch.running_column,
            batch.num_accepted,
            batch.next_token,
            batch.drafts,
        )
        return StepRows(layout, *numbers, layout.mamba_table, token_ids)

    def _propose(self, rows: StepRows, hidden: torch.Tensor, sampled: torch.Tensor, verified: Verified) -> torch.Tensor:
        """Draft: int64 [R, S], NO_TOKEN where there is none."""
        if self.step.mtp is not None:
            return self.step.propose_mtp(rows, hidden, sampled, verified.num_final)
        layout = rows.layout
        drafts = torch.full((layout.num_rows, self.num_spec_tokens), NO_TOKEN, device=hidden.device)
        if self.spec_method == "ngram" and layout.num_samples:
            drafts[layout.drafting] = self._propose_ngrams(rows, verified)
        return drafts

    def _propose_ngrams(self, rows: StepRows, verified: Verified) -> torch.Tensor:
        """Add the step's tokens to the histories on the device, and look their endings up there.

        What is written behind a text's end is overwritten before the text gets there.
        """
        batch, layout, drafting = self.batch, rows.layout, rows.layout.drafting
        slots = layout.slots[drafting].long()
        first = rows.num_computed + torch.where(layout.is_decode != 0, 1, layout.query_len)
        places = torch.arange(self.num_spec_tokens + 1, device=slots.device)
        batch.history[slots[:, None], first[drafting, None] + places] = verified.token_ids[drafting]
        lengths = (rows.num_computed + verified.num_final)[drafting] + 1  # the last sampled token is not computed yet
        return propose_ngrams(batch.history[slots], lengths, self.num_spec_tokens)
