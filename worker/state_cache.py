"""Device memory of both pools: KV blocks and recurrent-state blocks. Knows shapes; nothing of requests or hashes."""

from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch

from mambalign.kernels.mamba_state_table import MambaState
from mambalign.kernels.scan_tiles import has_room_for_inputs


@dataclass(frozen=True)
class StateSpec:
    """One recurrent state that a model keeps for each request.

    kind: "conv" (`shape` is (dim,); stored as [state_len, dim] or [dim, state_len]), "temporal" (any shape, copied
    whole), or "carry" (like temporal; the hidden state that the drafter resumes from).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class AttentionSpec:
    """KV shape of one attention layer: [block, kv_block_tokens, num_kv_heads, head_dim], keys and values apart."""

    name: str
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass
class StateCache:
    """The tensors, each indexed by block id first.

    keys, values: one per attention layer (target layers, then the drafter's), [num_kv_blocks, kv_block_tokens,
    num_kv_heads, head_dim]. conv: one per layer with a conv, [num_mamba_blocks, state_len, dim] (SD) or [.., dim,
    state_len] (DS). temporal: one per layer with a recurrence, if there are any, [num_mamba_blocks, ..]. carry:
    [num_mamba_blocks, hidden] or None without a drafter.
    """

    kv_block_tokens: int
    mamba_block_tokens: int
    conv_layout: str
    conv_width: int
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    conv: list[torch.Tensor] = field(default_factory=list)
    temporal: list[torch.Tensor] = field(default_factory=list)
    carry: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return (self.conv or self.keys)[0].device

    @cached_property
    def num_spec_tokens(self) -> int:
        """S: the conv slots that a state has for drafts."""
        state_len = self.conv[0].shape[2 if self.conv_layout == "DS" else 1]
        return state_len - (self.conv_width - 1)

    @cached_property
    def defer_within(self) -> int:
        """Tokens of the block that a row which defers stays within (`may_defer`); 1, never, where inputs do not fit."""
        return self.mamba_block_tokens if all(map(has_room_for_inputs, self.temporal)) else 1

    def mamba_states(self) -> list[MambaState]:
        """Every recurrent state: conv, temporal, carry."""
        states = [MambaState(tensor, "conv") for tensor in self.conv]
        states += [MambaState(tensor, "temporal") for tensor in self.temporal]
        return states if self.carry is None else [*states, MambaState(self.carry, "carry")]

    @classmethod
    def allocate(
        cls,
        attention_specs: list[AttentionSpec],
        state_specs: list[StateSpec],
        *,
        num_kv_blocks: int,
        num_mamba_blocks: int,
        kv_block_tokens: int,
        mamba_block_tokens: int,
        conv_layout: str,
        conv_width: int,
        num_spec_tokens: int,
        device: torch.device | str = "cpu",
        fill: float = 0.0,
    ) -> "StateCache":
        """Allocate both pools. `fill` is NaN in tests, so that a state read before it was written shows."""
        cache = cls(kv_block_tokens, mamba_block_tokens, conv_layout, conv_width)
        for spec in attention_specs:
            shape = (num_kv_blocks, kv_block_tokens, spec.num_kv_heads, spec.head_dim)
            cache.keys.append(torch.full(shape, fill, dtype=spec.dtype, device=device))
            cache.values.append(torch.full(shape, fill, dtype=spec.dtype, device=device))
        for spec in state_specs:
            shape = state_shape(spec, conv_layout, conv_width, num_spec_tokens)
            tensor = torch.full((num_mamba_blocks, *shape), fill, dtype=spec.dtype, device=device)
            if spec.kind == "conv":
                cache.conv.append(tensor)
            elif spec.kind == "temporal":
                cache.temporal.append(tensor)
            else:
                cache.carry = tensor
        return cache


def state_shape(spec: StateSpec, conv_layout: str, conv_width: int, num_spec_tokens: int) -> tuple[int, ...]:
    """Shape of one block of `spec`: a conv state has `conv_width - 1 + num_spec_tokens` slots."""
    if spec.kind != "conv":
        return spec.shape
    state_len = conv_width - 1 + num_spec_tokens
    return (state_len, *spec.shape) if conv_layout == "SD" else (*spec.shape, state_len)


def bytes_per_state(specs: list[StateSpec], conv_width: int, num_spec_tokens: int) -> int:
    """Bytes of one recurrent-state block over all layers."""
    shapes = [(spec, state_shape(spec, "SD", conv_width, num_spec_tokens)) for spec in specs]
    return sum(prod(shape) * spec.dtype.itemsize for spec, shape in shapes)


def bytes_per_kv_block(specs: list[AttentionSpec], kv_block_tokens: int) -> int:
    """Bytes of one KV block over all attention layers, keys and values."""
    return sum(2 * kv_block_tokens * s.num_kv_heads * s.head_dim * s.dtype.itemsize for s in specs)
