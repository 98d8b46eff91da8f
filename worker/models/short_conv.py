"""The mixer of LFM2's conv layers: a causal conv of few taps between two gates. It remembers a conv window alone."""

import torch

from mambalign.kernels.causal_conv1d import causal_conv1d_varlen
from mambalign.worker.models.layers import ForwardContext, Linear, take_conv
from mambalign.worker.models.loader import Weights


class GatedShortConv:
    """out_proj(C * conv(B * x)): in_proj -> [B | C | x], conv over the product, a channel at a time, no activation."""

    def __init__(self, config, weights: Weights, name: str, state_index: int):
        self.state_index = state_index  # which of the cache's conv states is this layer's
        hidden = config.hidden_size
        self.in_proj = Linear(weights, f"{name}.in_proj", hidden, 3 * hidden, config.conv_bias)
        self.conv_weight = take_conv(weights, f"{name}.conv", hidden, config.conv_width)
        self.conv_bias = weights.take(f"{name}.conv.bias", (hidden,), torch.float32) if config.conv_bias else None
        self.out_proj = self.last = Linear(weights, f"{name}.out_proj", hidden, hidden, config.conv_bias)

    def linears(self) -> list[Linear]:
        return [self.in_proj, self.out_proj]

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        cache = context.cache
        B, C, x = self.in_proj(x).chunk(3, dim=1)
        conv_state = cache.conv[self.state_index]
        y = causal_conv1d_varlen(
            B * x, conv_state, self.conv_weight, self.conv_bias, context.mamba, cache.conv_layout, has_silu=False
        )
        return self.out_proj(C * y)
