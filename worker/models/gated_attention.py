"""Attention with normed heads, partial rotary positions, and a gate on its output (arXiv 2505.06708)."""

import torch

from mambalign.kernels.attention import paged_attention_varlen
from mambalign.kernels.gather_rows import gather_rows
from mambalign.kernels.head_norm import HeadNorms
from mambalign.kernels.place_heads import place_heads
from mambalign.worker.models.layers import ForwardContext, Linear, ZeroCentredRMSNorm
from mambalign.worker.models.loader import Weights
from mambalign.worker.models.rotary import Rotary


class GatedAttention:
    """o_proj(attention(rotary(norm(q)), rotary(norm(k)), v) * sigmoid(gate)).

    q_proj is published as each head's query and gate side by side; here all queries, keys, values, gates.
    """

    def __init__(self, config, weights: Weights, name: str, kv_index: int, rotary: Rotary):
        self.kv_index = kv_index  # which of the cache's keys and values is this layer's
        self.head_dim, self.table, eps = config.head_dim, rotary.table, config.rms_norm_eps
        hidden, q_width = config.hidden_size, config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        self.widths = [q_width, kv_width, kv_width, q_width]
        published = torch.arange(2 * q_width + 2 * kv_width)
        query, gate = published[: 2 * q_width].view(-1, 2, self.head_dim).unbind(1)
        order = torch.cat([query.flatten(), published[2 * q_width :], gate.flatten()])
        names, widths = [f"{name}.{part}_proj" for part in "qkv"], [2 * q_width, kv_width, kv_width]
        self.in_proj = Linear(weights, names, hidden, widths, order=order)
        norms = (ZeroCentredRMSNorm(weights, f"{name}.{part}_norm", self.head_dim, eps) for part in "qk")
        self.norms = HeadNorms(*(norm.weight for norm in norms), eps)
        self.o_proj = self.last = Linear(weights, f"{name}.o_proj", q_width, hidden)

    def linears(self) -> list[Linear]:
        return [self.in_proj, self.o_proj]

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        keys, values = context.cache.keys[self.kv_index], context.cache.values[self.kv_index]
        *qkv, gate = self.in_proj(x).split(self.widths, dim=1)
        query, key, value = (t.unflatten(1, (-1, self.head_dim)) for t in qkv)
        place_heads(query, key, value, keys, values, context.slot_mapping, context.positions, self.norms, self.table)
        attention = context.attention
        if context.outputs is not None:
            tokens, attention = context.outputs.tokens, context.outputs.attention
            query = gather_rows(query.flatten(1), tokens).unflatten(1, (-1, self.head_dim))
            gate = gather_rows(gate, tokens)
        gate = gate.unflatten(1, (-1, self.head_dim))
        y = paged_attention_varlen(query, keys, values, attention, self.head_dim**-0.5, gate)
        return self.o_proj(y.flatten(1))
