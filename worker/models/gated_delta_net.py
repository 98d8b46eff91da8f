"""The mixer of Qwen3-Next and Qwen3.5: a conv over queries, keys and values, the gated delta rule, a gated norm."""

from functools import partial

import torch

from mambalign.kernels.causal_conv1d import causal_conv1d_varlen
from mambalign.kernels.gated_delta_chunk_scan import gated_delta_chunk_scan_varlen
from mambalign.kernels.gated_delta_rule import compile_for, gated_delta_rule_varlen
from mambalign.kernels.rms_norm import rms_norm_then_gate
from mambalign.worker.models.layers import ForwardContext, Linear, take_conv
from mambalign.worker.models.loader import Weights


class GatedDeltaNet:
    """Gated DeltaNet (arXiv 2412.06464): in_proj -> [q k v | gate | b | a], conv over q k v, rule, norm, out_proj.

    in_proj: a linear layer of these outputs in this order, heads side by side.
    """

    def __init__(self, config, weights: Weights, name: str, state_index: int, in_proj: Linear):
        self.state_index = state_index  # which of the cache's conv and temporal states is this layer's
        self.key_heads, self.num_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.eps, fp32 = config.rms_norm_eps, torch.float32
        key_width, width = config.linear_key_width, config.linear_value_width
        self.in_widths = [2 * key_width + width, width, self.num_heads, self.num_heads]
        self.qkv_widths = [key_width, key_width, width]
        self.in_proj = in_proj
        self.conv_weight = take_conv(weights, f"{name}.conv1d", self.in_widths[0], config.conv_width)
        self.A = -torch.exp(weights.take(f"{name}.A_log", (self.num_heads,), fp32))
        self.dt_bias = weights.take(f"{name}.dt_bias", (self.num_heads,), fp32)
        self.norm_weight = weights.take(f"{name}.norm.weight", (config.linear_value_head_dim,), fp32)
        self.out_proj = self.last = Linear(weights, f"{name}.out_proj", width, config.hidden_size)
        compile_for(weights.device)

    def linears(self) -> list[Linear]:
        return [self.in_proj, self.out_proj]

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        cache = context.cache
        qkv, gate, b, a = self.in_proj(x).split(self.in_widths, dim=1)
        conv_state = cache.conv[self.state_index]
        qkv = causal_conv1d_varlen(qkv, conv_state, self.conv_weight, None, context.mamba, cache.conv_layout)
        q, k, v = qkv.split(self.qkv_widths, dim=1)
        ruled = (
            q.unflatten(1, (self.key_heads, -1)),
            k.unflatten(1, (self.key_heads, -1)),
            v.unflatten(1, (self.num_heads, -1)),
            a,
            b,
            self.A,
            self.dt_bias,
            cache.temporal[self.state_index],
        )
        o = context.scan.run(partial(gated_delta_rule_varlen, *ruled), partial(gated_delta_chunk_scan_varlen, *ruled))
        return self.out_proj(rms_norm_then_gate(o, gate, self.norm_weight, self.eps))
