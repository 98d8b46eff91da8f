"""Model runner V1: a persistent batch in batch order, decisions on the CPU, results read back each step.

The simple one, and the reference for V2. A step: take over the scheduler's changes, move states (`preprocess_mamba`),
forward, sample and verify drafts, keep boundary states (`postprocess_mamba`), draft for the next step.
"""

from dataclasses import dataclass

import torch

from mambalign.worker.batch import RowResult, RunnerOutput, ScheduledRow, SchedulerOutput
from mambalign.worker.forward_batch import Boundary, ForwardBatch, MambaBatch
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.mamba_columns import table_width
from mambalign.worker.mamba_utils import MambaSpecDecodeGPUContext, postprocess_mamba, preprocess_mamba
from mambalign.worker.mtp import DraftRow, MtpProposer, attention_batch
from mambalign.worker.ngram import NgramIndex
from mambalign.worker.sampler import Sampler, SampleRow, verify_drafts
from mambalign.worker.state_cache import StateCache


@dataclass(frozen=True)
class RunnerLimits:
    max_num_seqs: int
    max_model_len: int
    num_spec_tokens: int
    spec_method: str  # "mtp" or "ngram"


class ModelRunnerV1:
    """Runs steps for `limits.max_num_seqs` requests at most; owns the batch, the cache's contents and the drafts."""

    def __init__(self, model, cache: StateCache, limits: RunnerLimits):
        self.model = model
        self.cache = cache
        self.num_spec_tokens = limits.num_spec_tokens
        width = table_width(limits.max_model_len, cache.mamba_block_tokens, limits.num_spec_tokens)
        self.batch = InputBatch(limits.max_num_seqs, width, cache.mamba_block_tokens)
        self.align_ctx = MambaSpecDecodeGPUContext(cache, limits.max_num_seqs, width)
        self.sampler = Sampler(model.eos_token_ids)
        drafts_by = limits.spec_method if limits.num_spec_tokens else None
        self.mtp = MtpProposer(model, cache, limits.num_spec_tokens) if drafts_by == "mtp" else None
        self.ngrams: dict[str, NgramIndex] | None = {} if drafts_by == "ngram" else None

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> RunnerOutput:
        """Run one step. Puts `scheduled.rows` into batch order; results come in that order."""
        self._take_over(scheduled)
        rows = scheduled.rows
        moved = preprocess_mamba(scheduled, self.batch, self.cache, align_ctx=self.align_ctx)
        forward = self._forward_batch(rows)
        carries = self._carries_before(forward.mamba)
        hidden = self.model.forward(forward, self.cache)
        self._write_carries(forward.mamba, hidden)
        tokens, logprobs = self._sample(rows, hidden)
        num_kept = [len(t) if row.is_decode else row.num_tokens for row, t in zip(rows, tokens, strict=True)]
        num_postcopies = postprocess_mamba(scheduled, num_kept, self.batch, self.cache, align_ctx=self.align_ctx)
        for row, kept in zip(rows, tokens, strict=True):
            self._request(row).output_token_ids.extend(kept)
        drafts = self._propose(rows, hidden, carries, tokens)
        results = [
            RowResult(row.request_id, *result) for row, *result in zip(rows, tokens, logprobs, drafts, strict=True)
        ]
        return RunnerOutput(results, moved.num_rows, moved.num_biased_rows, num_postcopies)

    def _request(self, row: ScheduledRow):
        return self.batch.requests[self.batch.row_of[row.request_id]]

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

    def _forward_batch(self, rows: list[ScheduledRow]) -> ForwardBatch:
        lens = [row.num_tokens for row in rows]
        starts = [row.num_computed_tokens for row in rows]
        batch_rows = [self.batch.row_of[row.request_id] for row in rows]
        mamba = MambaBatch(
            query_lens=lens,
            is_decode=[row.is_decode for row in rows],
            has_state=[n > 0 for n in starts],
            running_column=[int(self.batch.mamba_state_idx[r]) for r in batch_rows],
            num_accepted=[int(self.batch.num_accepted[r]) for r in batch_rows],
            block_table=[row.mamba_blocks for row in rows],
            boundaries=[b for i, row in enumerate(rows) for b in self._boundaries(i, row)],
            conv_layout=self.cache.conv_layout,
        )
        return ForwardBatch(
            input_ids=torch.tensor([t for row in rows for t in row.token_ids]),
            positions=torch.cat([torch.arange(n, n + q) for n, q in zip(starts, lens, strict=True)]),
            attention=attention_batch([row.kv_blocks for row in rows], starts, lens, self.cache, first_key=0),
            mamba=mamba,
        )

    def _boundaries(self, i: int, row: ScheduledRow) -> list[Boundary]:
        """Boundary states that the forward pass leaves beside the running one."""
        size = self.cache.mamba_block_tokens
        running = int(self.batch.mamba_state_idx[self.batch.row_of[row.request_id]])
        return [
            Boundary(i, m - row.num_computed_tokens, row.mamba_blocks[m // size - 1])
            for m in row.boundaries
            if m // size - 1 != running
        ]

    # Carries: the hidden state of a row's last token, which the drafter needs to go on after a cache hit.

    def _carries_before(self, mamba: MambaBatch) -> dict[int, torch.Tensor]:
        """Carry of each prefill row that starts behind its text's beginning, read before it is overwritten."""
        if self.mtp is None:
            return {}
        return {
            i: self.cache.carry[mamba.block_table[i][mamba.running_column[i]]].clone()
            for i in range(len(mamba.query_lens))
            if not mamba.is_decode[i] and mamba.has_state[i]
        }

    def _write_carries(self, mamba: MambaBatch, hidden: torch.Tensor) -> None:
        if self.mtp is None:
            return
        blocks, sources, start = [], [], 0
        starts = []
        for i, q in enumerate(mamba.query_lens):
            starts.append(start)
            column = mamba.running_column[i]
            for j in range(q) if mamba.is_decode[i] else (q - 1,):
                blocks.append(mamba.block_table[i][column + j if mamba.is_decode[i] else column])
                sources.append(start + j)
            start += q
        for boundary in mamba.boundaries:
            blocks.append(boundary.block_id)
            sources.append(starts[boundary.row] + boundary.num_tokens - 1)
        self.cache.carry[blocks] = hidden[sources]

    def _sample(self, rows: list[ScheduledRow], hidden: torch.Tensor) -> tuple[list[list[int]], list[list | None]]:
        """Kept tokens of each row (none for an unfinished prompt) and their log-probabilities."""
        sources, sample_rows, counts, start = [], [], [], 0
        for row in rows:
            positions = range(row.num_tokens) if row.is_decode else [row.num_tokens - 1] * row.samples
            sources += [start + j for j in positions]
            sample_rows += [self._sample_row(row, j) for j in positions]
            counts.append(len(positions))
            start += row.num_tokens
        if not sources:
            return [[] for _ in rows], [None for _ in rows]
        sampled = self.sampler(self.model.compute_logits(hidden[sources]), sample_rows)
        tokens, logprobs, at = [], [], 0
        for row, count in zip(rows, counts, strict=True):
            targets = sampled.token_ids[at : at + count]
            kept = verify_drafts([targets], [row.token_ids[1:]])[0] if row.is_decode else count
            tokens.append(targets[:kept])
            wanted = self._request(row).params.logprobs is not None and count
            logprobs.append(sampled.logprobs[at : at + kept] if wanted else None)
            at += count
        return tokens, logprobs

    def _sample_row(self, row: ScheduledRow, j: int) -> SampleRow:
        """How the token after the row's j-th is taken: as if its drafts up to there had been sampled singly."""
        request = self._request(row)
        drafts = row.token_ids[1 : j + 1] if row.is_decode else []
        history = request.output_token_ids + drafts if drafts else request.output_token_ids
        position = row.num_computed_tokens + j + 1
        return SampleRow(request.params, request.prompt_token_ids, history, position, request.choice)

    def _propose(
        self,
        rows: list[ScheduledRow],
        hidden: torch.Tensor,
        carries: dict[int, torch.Tensor],
        tokens: list[list[int]],
    ) -> list[list[int]]:
        if self.ngrams is not None:
            return [self._propose_ngram(row, kept) for row, kept in zip(rows, tokens, strict=True)]
        if self.mtp is None:
            return [[] for _ in rows]
        draft_rows, start = [], 0
        for i, (row, kept) in enumerate(zip(rows, tokens, strict=True)):
            num_final = len(kept) if row.is_decode else row.num_tokens
            draft_rows.append(self._draft_row(row, hidden[start : start + num_final], carries.get(i), kept))
            start += row.num_tokens
        return self.mtp.propose(draft_rows)

    def _propose_ngram(self, row: ScheduledRow, kept: list[int]) -> list[int]:
        index = self.ngrams[row.request_id]
        index.extend(kept)
        return index.propose(self.num_spec_tokens) if kept else []

    def _draft_row(
        self, row: ScheduledRow, hidden: torch.Tensor, carry: torch.Tensor | None, kept: list[int]
    ) -> DraftRow:
        """Drafter inputs for the tokens that this step committed: each token with the hidden state before it."""
        n = row.num_computed_tokens
        if row.is_decode:
            return DraftRow(hidden, kept, n + 1, row.kv_blocks, wants_drafts=True)
        after = kept if row.samples else [row.next_token_id]
        if carry is None:  # the text's beginning: slot 0 stays empty
            return DraftRow(hidden, row.token_ids[1:] + after, 1, row.kv_blocks, row.samples)
        return DraftRow(torch.cat([carry[None], hidden]), row.token_ids + after, n, row.kv_blocks, row.samples)
