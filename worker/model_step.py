"""What both runners do alike in a step: forward, sample, verify, draft. Knows rows, not batches or slots.

A runner brings each row's numbers (`StepRows`), moves states before and keeps boundary states after sampling. All of
it runs on the device, and nothing waits for it.
"""

from dataclasses import dataclass

import numpy as np
import torch

from mambalign.kernels.sampling import argmax_rows
from mambalign.kernels.scatter_rows import scatter_rows
from mambalign.kernels.verify_drafts import verify_drafts
from mambalign.worker.batch import ScheduledRow
from mambalign.worker.cpu import StepThreads
from mambalign.worker.forward_batch import NO_TOKEN, StepRows, forward_batch
from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.host_copy import to_device
from mambalign.worker.input_batch import CachedRequest
from mambalign.worker.logprobs import LogprobCopy
from mambalign.worker.mtp import MtpProposer
from mambalign.worker.sampler import Sampler, SamplerOutput, SampleRow
from mambalign.worker.state_cache import StateCache
from mambalign.worker.step_graphs import Graph, StepGraphs, graph_sizes

PROMPT_LOGITS_ROWS = 64  # rows of logits that are looked at together for a prompt's log-probabilities


@dataclass(frozen=True)
class Verified:
    """Tokens of each row after verification, on the device."""

    token_ids: torch.Tensor  # int64 [R, S+1]; the first num_kept of each row count
    counts: torch.Tensor  # int32 [4, R], as `verify_drafts` gives them

    @property
    def num_kept(self) -> torch.Tensor:
        """int32 [R], 0 for a row that does not sample."""
        return self.counts[0]

    @property
    def num_final(self) -> torch.Tensor:
        """int32 [R], tokens of each row whose state is final: kept ones of a decode row, all of a prompt's."""
        return self.counts[2]

    @property
    def num_kept_of_decode(self) -> torch.Tensor:
        """int32 [R], 0 for a prompt's row."""
        return self.counts[3]


@dataclass(frozen=True)
class RunnerLimits:
    """What a runner is built for. Without MTP drafts no carry is kept."""

    max_num_seqs: int
    max_model_len: int
    num_spec_tokens: int
    spec_method: str | None  # "mtp" or "ngram"; None without drafts
    check_fused_copy_rate: float = 0.0  # share of steps whose pre-copy is checked against the scalar path
    step_graphs: bool = False  # run decode steps and single prompts padded, and on a GPU captured
    max_num_batched_tokens: int = 0  # of a step, for the graphs of prompts
    by_chunk: bool = False  # how prompts are scanned
    spec_acceptance: float | None = None  # benchmarks: mean of tokens kept a step, whatever they are

    def max_kv_blocks(self, kv_block_tokens: int) -> int:
        """Most KV blocks of a row: two steps of drafts may be scheduled past the end of the longest text."""
        return -(-(self.max_model_len + 3 * (self.num_spec_tokens + 1)) // kv_block_tokens)


class SyntheticAcceptance:
    """Keeps a mean of `mean_kept` tokens a step, bonus included: draft j with the chance r**j. For benchmarks only."""

    NUM_DRAWN = 1 << 16

    def __init__(self, mean_kept: float, num_spec_tokens: int, device: torch.device):
        low, high = 0.0, 1.0
        for _ in range(60):
            r = (low + high) / 2
            low, high = (r, high) if sum(r**j for j in range(num_spec_tokens + 1)) < mean_kept else (low, r)
        rates = torch.tensor([high**j for j in range(1, num_spec_tokens + 1)])
        chance = torch.rand(self.NUM_DRAWN, 1, generator=torch.Generator().manual_seed(0))
        self._drawn = (1 + (chance < rates).sum(1)).int().to(device)  # at once: a step must cost what real ones do
        self._next = 0

    def draw(self, num_rows: int) -> torch.Tensor:
        """Tokens to keep of each row, int32 [R]."""
        if self._next + num_rows > self.NUM_DRAWN:
            self._next = 0
        self._next += num_rows
        return self._drawn[self._next - num_rows : self._next]


class ModelStep:
    """Runs the model over the rows of one step."""

    def __init__(
        self, model, cache: StateCache, limits: RunnerLimits, table_width: int, grammars: GrammarCompiler | None = None
    ):
        self.grammars = grammars
        self.model = model
        self.cache = cache
        self.num_spec_tokens = limits.num_spec_tokens
        self.mtp = None
        if limits.spec_method == "mtp":
            self.mtp = MtpProposer(model, cache, limits.num_spec_tokens, limits.max_num_seqs)
        self.sampler = Sampler(model.eos_token_ids)
        self._threads = StepThreads() if cache.device.type == "cpu" else None
        self.acceptance = None
        if limits.spec_acceptance is not None:
            self.acceptance = SyntheticAcceptance(limits.spec_acceptance, limits.num_spec_tokens, cache.device)
        self.graphs: StepGraphs | None = None
        if limits.step_graphs:
            self.graphs = StepGraphs(
                self._forward,
                self._propose_mtp if self.mtp else None,
                graph_sizes(limits.max_num_seqs),
                limits.max_num_batched_tokens,
                limits.by_chunk,
                limits.num_spec_tokens,
                table_width,
                cache.kv_block_tokens,
                limits.max_kv_blocks(cache.kv_block_tokens),
                cache.device,
            )
        self._graph: Graph | None = None  # of the step that runs

    def forward(self, rows: StepRows) -> torch.Tensor:
        """Hidden states [T, hidden] of all rows' tokens; leaves KV, states and carries in the cache."""
        if self._threads:
            self._threads.set_for(rows.layout.num_tokens)
        self._graph = self.graphs.pick(rows) if self.graphs else None
        return self.graphs.forward(self._graph, rows) if self._graph else self._forward(rows)

    def _forward(self, rows: StepRows) -> torch.Tensor:
        batch = forward_batch(rows, self.cache)
        if self.mtp is not None and len(rows.layout.resumed):
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
    ) -> SamplerOutput:
        """The target's own token after each sampled position, and log-probabilities where asked for."""
        if all(request.params.is_plain_greedy for request in requests):
            token_ids = argmax_rows(logits)
            return SamplerOutput(token_ids, LogprobCopy(logits, token_ids, [None] * len(logits)))
        layout = rows.layout
        at = layout.sample_index
        positions = rows.num_computed[layout.row_of_token[at]] + layout.offset_of_token[at] + 1
        return self.sampler(logits, self._sample_rows(scheduled, requests), positions)

    def prompt_logprobs(
        self, hidden: torch.Tensor, scheduled: list[ScheduledRow], requests: list[CachedRequest]
    ) -> list[list[LogprobCopy]]:
        """Of each row whose request asks: the log-probabilities of the prompt's tokens n+1 .. n+q, as far as it goes.

        hidden [T, hidden]. Takes logits of its own, a few rows at a time: a row's bits do not depend on the others.
        """
        results: list[list[LogprobCopy]] = []
        start = 0
        for row, request in zip(scheduled, requests, strict=True):
            count, copies = request.params.prompt_logprobs, []
            if count is not None and not row.is_decode:
                n = row.num_computed_tokens
                targets = request.prompt_token_ids[n + 1 : n + 1 + row.num_tokens]
                for at in range(0, len(targets), PROMPT_LOGITS_ROWS):
                    part = targets[at : at + PROMPT_LOGITS_ROWS]
                    logits = self.model.compute_logits(hidden[start + at : start + at + len(part)])
                    token_ids = to_device(part, torch.int64, logits.device)
                    copies.append(LogprobCopy(logits, token_ids, [count] * len(part)))
            results.append(copies)
            start += row.num_tokens
        return results

    def _sample_rows(self, scheduled: list[ScheduledRow], requests: list[CachedRequest]) -> list[SampleRow]:
        """How each token is taken: as if the drafts up to there had been sampled one at a time."""
        sample_rows = []
        for row, request in zip(scheduled, requests, strict=True):
            params, prompt, output = request.params, request.prompt_token_ids, request.output_token_ids
            if not params.needs_host:
                sample_rows += [SampleRow(params, prompt, output, request.choice)] * row.num_samples
            elif row.samples:
                num_drafts = row.num_samples - 1
                drafts = (request.draft_token_ids + [NO_TOKEN] * num_drafts)[:num_drafts]
                for j, allowed in enumerate(self._grammar_masks(request, drafts)):
                    sample_rows.append(SampleRow(params, prompt, output + drafts[:j], request.choice, allowed))
        return sample_rows

    def _grammar_masks(self, request: CachedRequest, drafts: list[int]) -> list[np.ndarray | None]:
        """Allowed tokens at each place that a row samples; None for all, as without a grammar."""
        wanted = request.params.structured_outputs
        if wanted is None:
            return [None] * (1 + len(drafts))
        if request.grammar is None:
            request.grammar = self.grammars.start(wanted)
        return request.grammar.masks(request.output_token_ids, drafts)

    def verify(self, rows: StepRows, sampled: torch.Tensor) -> Verified:
        """Accept each row's drafts while they equal the target's own tokens."""
        layout = rows.layout
        return Verified(
            *verify_drafts(
                sampled,
                rows.token_ids,
                layout.query_start,
                layout.query_len,
                layout.is_decode,
                layout.sample_start,
                layout.samples_of_row,
                self.num_spec_tokens,
                self.acceptance.draw(layout.num_rows) if self.acceptance else None,
            )
        )

    def propose_mtp(
        self, rows: StepRows, hidden: torch.Tensor, sampled: torch.Tensor, num_final: torch.Tensor
    ) -> torch.Tensor:
        """Fill the drafter's slots for every token that the step made final, and draft where a row sampled.

        num_final int32 [R]. Returns drafts int64 [R, S]; NO_TOKEN in rows without.
        """
        if self._graph:
            return self.graphs.propose(self._graph, sampled, num_final)
        return self._propose_mtp(rows, hidden, sampled, num_final)

    def _propose_mtp(
        self, rows: StepRows, hidden: torch.Tensor, sampled: torch.Tensor, num_final: torch.Tensor
    ) -> torch.Tensor:
        layout = rows.layout
        next_ids = sampled
        if layout.num_samples < layout.num_tokens:
            next_ids = layout.next_token_ids.index_copy(0, layout.sample_index, sampled)
        return self.mtp.propose(rows, hidden, next_ids, num_final)
