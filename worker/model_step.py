"""What both runners do alike in a step: forward, sample, verify, draft. Knows rows, not batches or slots.

A runner brings each row's numbers (`StepRows`), moves states before and keeps boundary states after sampling. All of
it runs on the device; only rows that do not sample greedily are looked at by the host.
"""

from dataclasses import dataclass

import torch

from mambalign.kernels.sampling import accept_drafts, argmax_rows
from mambalign.kernels.scatter_rows import scatter_rows
from mambalign.worker.batch import ScheduledRow
from mambalign.worker.forward_batch import NO_TOKEN, StepRows, forward_batch
from mambalign.worker.input_batch import CachedRequest
from mambalign.worker.mtp import MtpProposer
from mambalign.worker.sampler import Sampler, SampleRow
from mambalign.worker.sampling_params import TokenLogprobs
from mambalign.worker.state_cache import StateCache


@dataclass(frozen=True)
class Verified:
    """Tokens of each row after verification, on the device."""

    token_ids: torch.Tensor  # int64 [R, S+1]; the first num_kept of each row count
    num_kept: torch.Tensor  # int32 [R], 0 for a row that does not sample
    num_drafts: torch.Tensor  # int64 [R], drafts that were looked at


class ModelStep:
    """Runs the model over the rows of one step. `mtp` is None without MTP drafts; then no carry is kept."""

    def __init__(self, model, cache: StateCache, mtp: MtpProposer | None, num_spec_tokens: int):
        self.model = model
        self.cache = cache
        self.mtp = mtp
        self.num_spec_tokens = num_spec_tokens
        self.sampler = Sampler(model.eos_token_ids)

    def forward(self, rows: StepRows) -> torch.Tensor:
        """Hidden states [T, hidden] of all rows' tokens; leaves KV, states and carries in the cache."""
        batch = forward_batch(rows, self.cache)
        if self.mtp is not None and rows.layout.resumed:
            self.mtp.resume(rows, batch.mamba.temporal_block)
        hidden = self.model.forward(batch, self.cache)
        if self.mtp is not None:
            scatter_rows(hidden, self.cache.carry, batch.mamba.state_block)
        return hidden

    def logits(self, rows: StepRows, hidden: torch.Tensor) -> torch.Tensor:
        """[N, vocab] fp32, one row a sample."""
        if rows.layout.num_samples < rows.layout.num_tokens:
            hidden = hidden.index_select(0, rows.layout.sample_index)
        return self.model.compute_logits(hidden)

    def sample(
        self, rows: StepRows, logits: torch.Tensor, scheduled: list[ScheduledRow], requests: list[CachedRequest]
    ) -> tuple[torch.Tensor, list[TokenLogprobs | None]]:
        """The target's own token int64 [N] after each sampled position, and log-probabilities where asked for."""
        if all(request.params.is_plain_greedy for request in requests):
            return argmax_rows(logits), [None] * len(logits)
        sampled = self.sampler(logits, self._sample_rows(rows, scheduled, requests))
        return torch.tensor(sampled.token_ids, device=logits.device), sampled.logprobs

    def _sample_rows(
        self, rows: StepRows, scheduled: list[ScheduledRow], requests: list[CachedRequest]
    ) -> list[SampleRow]:
        """How each token is taken: as if the drafts up to there had been sampled one at a time."""
        computed, token_ids, start = rows.num_computed.tolist(), rows.token_ids.tolist(), 0
        sample_rows = []
        for n, row, request in zip(computed, scheduled, requests, strict=True):
            for j in range(row.num_tokens) if row.is_decode else [row.num_tokens - 1] * row.samples:
                drafts = token_ids[start + 1 : start + j + 1] if row.is_decode else []
                output = request.output_token_ids + drafts if drafts else request.output_token_ids
                prompt = request.prompt_token_ids
                sample_rows.append(SampleRow(request.params, prompt, output, n + j + 1, request.choice))
            start += row.num_tokens
        return sample_rows

    def verify(self, rows: StepRows, sampled: torch.Tensor) -> Verified:
        """Accept each row's drafts while they equal the target's own tokens."""
        layout, k = rows.layout, self.num_spec_tokens
        places = torch.arange(k + 1, device=sampled.device)
        if not layout.num_samples:
            none = torch.full((layout.num_rows, k + 1), NO_TOKEN, device=sampled.device)
            return Verified(none, torch.zeros_like(layout.query_len), torch.zeros_like(layout.sample_start))
        targets = sampled[(layout.sample_start[:, None] + places).clamp_(max=layout.num_samples - 1)]
        drafts = rows.token_ids[(layout.query_start[:, None] + places[1:]).clamp_(max=layout.num_tokens - 1)]
        is_draft = (places[1:] < layout.samples_of_row[:, None]) & (drafts != NO_TOKEN)
        return Verified(targets, accept_drafts(targets, drafts, layout.samples_of_row), is_draft.sum(1))

    def propose_mtp(
        self, rows: StepRows, hidden: torch.Tensor, sampled: torch.Tensor, num_final: torch.Tensor
    ) -> torch.Tensor:
        """Fill the drafter's slots for every token that the step made final, and draft where a row sampled.

        num_final int32 [R]. Returns drafts int64 [R, S]; NO_TOKEN in rows without.
        """
        layout = rows.layout
        next_ids = layout.next_token_ids
        if layout.num_samples:
            next_ids = next_ids.index_copy(0, layout.sample_index, sampled)
        return self.mtp.propose(rows, hidden, next_ids, num_final)
