"""What a step must move and compute, from a checkpoint's config.json alone: the ceiling that figures are held against.

A step's parts follow one another: the layers, the head, the drafter's passes, the states, the keys and values. Each
takes its bytes over the machine's copy rate, or its operations over the machine's matmul rate where that is longer.
Left out, so that the ceiling is one: activations, logits, norms, the arithmetic of scan and attention, the host.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from mambalign.worker.models.layers import Linear
from mambalign.worker.models.loader import DummyWeights
from mambalign.worker.models.moe import ExpertWeight
from mambalign.worker.models.registry import family_of
from mambalign.worker.state_cache import StateSpec, bytes_per_kv_block, bytes_per_state


@dataclass(frozen=True)
class Machine:
    """Measured, or given."""

    bytes_per_s: float  # of a large copy, read plus written
    flops_per_s: float  # of large matmuls in the model's dtype

    def seconds(self, num_bytes: float, flops: float = 0.0) -> float:
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True)
class Weights:
    """Numbers of weights in linear layers: those that every token passes, and those of experts, which some take."""

    dense: int = 0
    expert: int = 0  # of one expert, over all layers
    num_experts: int = 1  # a layer
    top_k: int = 1  # experts a token

    @classmethod
    def of(cls, linears: Iterable[Linear | ExpertWeight]) -> "Weights":
        """All layers have the same number of experts."""
        dense = expert = 0
        shape = (1, 1)
        for linear in linears:
            if isinstance(linear, ExpertWeight):
                expert += linear.weight.numel()
                shape = (linear.num_experts, linear.top_k)
            else:
                dense += linear.weight.numel()
        return cls(dense, expert, *shape)

    def used(self) -> int:
        """By one token."""
        return self.dense + self.expert * self.top_k

    def read(self, num_tokens: int) -> float:
        """By a step of so many tokens, each of which takes any experts as likely as any others: the mean."""
        missed = (1.0 - self.top_k / self.num_experts) ** num_tokens
        return self.dense + self.expert * self.num_experts * (1.0 - missed)


@dataclass(frozen=True)
class StepModel:
    """What a step multiplies by, and bytes that every row keeps."""

    layers: Weights  # of the target, without the head
    head: Weights
    draft_weight_bytes: int  # of one weight of the head that drafts are taken from
    drafter: Weights | None  # None without drafts
    weight_bytes: int  # of one weight
    temporal_bytes: int  # of one row, all layers
    conv_bytes: int
    kv_token_bytes: int  # of one token, the target's layers
    drafter_kv_token_bytes: int
    num_spec_tokens: int

    @classmethod
    def of(cls, path: Path, dtype: torch.dtype, num_spec_tokens: int, fp8_drafts: bool) -> "StepModel":
        """Read `path/config.json`; no weight. Temporal states are fp32, drafts the MTP head's."""
        family, config = family_of(path)
        model = family(config, DummyWeights(dtype, "meta", config.tie_word_embeddings))
        drafts = num_spec_tokens > 0 and model.has_mtp
        target_kv = bytes_per_kv_block(config.attention_specs(dtype, with_drafter=False), 1)
        all_kv = bytes_per_kv_block(config.attention_specs(dtype, with_drafter=drafts), 1)
        specs = config.state_specs(dtype, torch.float32, with_drafter=False)

        def state_bytes(kind: str) -> int:
            of_kind: list[StateSpec] = [spec for spec in specs if spec.kind == kind]
            return bytes_per_state(of_kind, config.conv_width, num_spec_tokens)

        return cls(
            layers=Weights.of(linear for block in model.blocks for linear in block.linears()),
            head=Weights(model.head_weight.numel()),
            draft_weight_bytes=torch.float8_e4m3fn.itemsize if fp8_drafts else dtype.itemsize,
            drafter=Weights.of(model.mtp.linears()) if drafts else None,
            weight_bytes=dtype.itemsize,
            temporal_bytes=state_bytes("temporal"),
            conv_bytes=state_bytes("conv"),
            kv_token_bytes=target_kv,
            drafter_kv_token_bytes=all_kv - target_kv,
            num_spec_tokens=num_spec_tokens,
        )

    def _matmuls(self, machine: Machine, weights: Weights, num_tokens: int) -> float:
        return machine.seconds(weights.read(num_tokens) * self.weight_bytes, 2.0 * weights.used() * num_tokens)

    def _drafter_seconds(self, machine: Machine, num_rows: int, num_tokens: int, context: int) -> float:
        """One pass over all tokens of the step, then one a further draft over the last token of each row."""
        if self.drafter is None:
            return 0.0
        kv = machine.seconds(num_rows * context * self.drafter_kv_token_bytes)
        share = self.draft_weight_bytes / self.weight_bytes  # of the time too, where operations are the limit
        head_seconds = share * self._matmuls(machine, self.head, num_rows)
        seconds = 0.0
        for i in range(self.num_spec_tokens):
            seconds += self._matmuls(machine, self.drafter, num_rows if i else num_tokens)
            seconds += head_seconds + kv
        return seconds

    def decode_seconds(self, machine: Machine, num_rows: int, context: int) -> float:
        """A step of `num_rows` rows with all their drafts, whose states are deferred: one read, one left."""
        num_tokens = num_rows * (self.num_spec_tokens + 1)
        states = num_rows * 2 * (self.temporal_bytes + self.conv_bytes)
        return (
            self._matmuls(machine, self.layers, num_tokens)
            + self._matmuls(machine, self.head, num_tokens)
            + machine.seconds(states)
            + machine.seconds(num_rows * context * self.kv_token_bytes)
            + self._drafter_seconds(machine, num_rows, num_tokens, context)
        )

    def prefill_seconds(self, machine: Machine, num_new: int, num_cached: int = 0) -> float:
        """`num_new` tokens of one prompt behind `num_cached`, up to the first token and its drafts."""
        return (
            self._matmuls(machine, self.layers, num_new)
            + self._matmuls(machine, self.head, 1)
            + machine.seconds(2 * (self.temporal_bytes + self.conv_bytes))
            + machine.seconds((num_new + num_cached) * self.kv_token_bytes)
            + self._drafter_seconds(machine, 1, num_new, num_new + num_cached)
        )
