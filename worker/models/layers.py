"""The layers of a hybrid model: Mamba-2 mixer, attention, MLP. Each takes its weights by published name.

A layer holds its weights and shapes, and no state: states and keys live in a `StateCache`, found through the plans
of a `ForwardContext`. Linear weights are K-major (see `kernels/linear.py`); norms and state parameters are fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from mambalign.kernels.attention import paged_attention_varlen
from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.causal_conv1d import causal_conv1d_varlen
from mambalign.kernels.gather_rows import gather_rows
from mambalign.kernels.head_norm import HeadNorms
from mambalign.kernels.linear import linear, linear_for_sum
from mambalign.kernels.mamba2_chunk_scan import mamba2_chunk_scan_varlen
from mambalign.kernels.mamba2_scan import mamba2_scan_varlen
from mambalign.kernels.place_heads import place_heads
from mambalign.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_gated
from mambalign.kernels.rows import MambaRows, ScanRows
from mambalign.worker.models.loader import Weights
from mambalign.worker.models.rotary import Rotary
from mambalign.worker.state_cache import StateCache


@dataclass(frozen=True)
class OutputTokens:
    """D of a pass's tokens whose results are wanted, and the same tokens as rows of one query each."""

    tokens: torch.Tensor  # int64 [D]
    attention: AttentionRows


@dataclass(frozen=True)
class ForwardContext:
    """What the layers of one pass share: the cache, and where each row's keys and states are in it."""

    cache: StateCache
    positions: torch.Tensor  # int64 [T], absolute
    slot_mapping: torch.Tensor
    attention: AttentionRows
    mamba: MambaRows | None = None
    scan: ScanRows | None = None  # the rows of `mamba`
    outputs: "OutputTokens | None" = None  # of a pass that only these tokens leave: the first layer leaves all keys


class Linear:
    """y = x @ weight (+ bias), batch-invariant. Given several names, layers with one input run as one, side by side.

    order: int64, which published output feature stands at each place; None for the published order.
    """

    is_summed = False  # only `RMSNorm.of_sum` reads what it returns

    def __init__(
        self,
        weights: Weights,
        names: str | list[str],
        in_features: int,
        out_features: int | list[int],
        bias: bool = False,
        order: torch.Tensor | None = None,
    ):
        if isinstance(names, str):
            names, out_features = [names], [out_features]
        parts = list(zip(names, out_features, strict=True))
        weight = torch.cat([weights.take(f"{name}.weight", (width, in_features)) for name, width in parts])
        bias = torch.cat([weights.take(f"{name}.bias", (width,)) for name, width in parts]) if bias else None
        if order is not None:
            order = order.to(weight.device)
            weight, bias = weight[order], None if bias is None else bias[order]
        self.weight, self.bias = weight.t().contiguous(), bias  # K-major

    def __call__(self, x: torch.Tensor, activation: str | None = None) -> torch.Tensor:
        if self.is_summed:
            return linear_for_sum(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias, activation)


class RMSNorm:
    def __init__(self, weights: Weights, name: str, width: int, eps: float):
        self.weight = weights.take(f"{name}.weight", (width,), torch.float32)
        self.eps = eps

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, written to `out` if given."""
        return rms_norm(x, self.weight, self.eps, out)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + residual, and the sum itself. x: of any layer, also of one that `is_summed`."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class ZeroCentredRMSNorm(RMSNorm):
    """An RMS norm whose published weight is its distance from 1."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float):
        super().__init__(weights, name, width, eps)
        self.weight = self.weight + 1.0


class GatedRMSNorm:
    """rms_norm(y * silu(gate)) within groups of channels: how Mamba-2's gate meets its scan."""

    def __init__(self, weights: Weights, name: str, width: int, num_groups: int, eps: float):
        self.weight = weights.take(f"{name}.weight", (width,), torch.float32)
        self.group_width, self.eps = width // num_groups, eps

    def __call__(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """y [T, width] fp32, gate [T, width]. Returns [T, width] in the dtype of gate."""
        return rms_norm_gated(y, gate, self.weight, self.eps, self.group_width)


def take_conv(weights: Weights, name: str, channels: int, width: int) -> torch.Tensor:
    """The taps of a causal depthwise conv, fp32 [width, channels], oldest first; published as [channels, 1, width]."""
    weight = weights.take(f"{name}.weight", (channels, 1, width), torch.float32)
    return weight[:, 0].t().contiguous()


class Mamba2Mixer:
    """Mamba-2 (arXiv 2405.21060): in_proj -> [gate | x B C | dt], conv over x B C, scan, gated norm, out_proj.

    A family that differs in how the input is projected or the gate applied overrides `project` or `gate_norm`.
    out_bias: whether out_proj has one; as in_proj by default.
    """

    def __init__(self, config, weights: Weights, name: str, state_index: int, out_bias: bool | None = None):
        self.state_index = state_index  # which of the cache's conv and temporal states is this layer's
        self.num_heads, self.head_dim = config.mamba_num_heads, config.mamba_head_dim
        self.num_groups, self.d_state = config.n_groups, config.ssm_state_size
        self.width = config.mamba_width
        self.dt_min = config.time_step_min
        conv_dim, fp32 = config.conv_dim, torch.float32
        self.in_proj = Linear(
            weights, f"{name}.in_proj", config.hidden_size, self.width + conv_dim + self.num_heads, config.use_bias
        )
        self.conv_weight = take_conv(weights, f"{name}.conv1d", conv_dim, config.conv_kernel)
        self.conv_bias = self.conv_weight.new_zeros(conv_dim)
        if config.use_conv_bias:
            self.conv_bias = weights.take(f"{name}.conv1d.bias", (conv_dim,), fp32)
        self.A = -torch.exp(weights.take(f"{name}.A_log", (self.num_heads,), fp32))
        self.D = weights.take(f"{name}.D", (self.num_heads,), fp32)
        self.dt_bias = weights.take(f"{name}.dt_bias", (self.num_heads,), fp32)
        self.gated = self.gate_norm(config, weights, f"{name}.norm")
        out_bias = config.use_bias if out_bias is None else out_bias
        self.out_proj = self.last = Linear(weights, f"{name}.out_proj", self.width, config.hidden_size, out_bias)

    def linears(self) -> list[Linear]:
        return [self.in_proj, self.out_proj]

    def gate_norm(self, config, weights: Weights, name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """What makes the input of out_proj from the scan's output and the gate."""
        return GatedRMSNorm(weights, name, self.width, self.num_groups, config.layer_norm_epsilon)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [T, hidden] -> gate [T, width], conv input [T, conv_dim], dt [T, heads]."""
        return self.in_proj(x).split([self.width, self.conv_weight.shape[1], self.num_heads], dim=-1)

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        cache, num_tokens = context.cache, x.shape[0]
        gate, xbc, dt = self.project(x)
        xbc = causal_conv1d_varlen(
            xbc,
            cache.conv[self.state_index],
            self.conv_weight,
            self.conv_bias,
            context.mamba,
            cache.conv_layout,
        )
        group_width = self.num_groups * self.d_state
        x, B, C = xbc.split([self.width, group_width, group_width], dim=-1)
        scanned = (
            x.unflatten(1, (self.num_heads, self.head_dim)),
            dt,
            B.unflatten(1, (self.num_groups, self.d_state)),
            C.unflatten(1, (self.num_groups, self.d_state)),
            self.A,
            self.D,
            self.dt_bias,
            self.dt_min,
            cache.temporal[self.state_index],
        )
        y = context.scan.run(partial(mamba2_scan_varlen, *scanned), partial(mamba2_chunk_scan_varlen, *scanned))
        return self.out_proj(self.gated(y.view(num_tokens, -1), gate))


class Attention:
    """Grouped-query attention; without `rotary` the Mamba layers alone carry the order of the tokens.

    norms: of the heads of queries and keys, before `rotary`. scale: of the scores, head_dim^-1/2 by default. out_name:
    of the projection back. in_features: width of the input, the model's by default.
    """

    def __init__(
        self,
        config,
        weights: Weights,
        name: str,
        kv_index: int,
        bias: bool = False,
        rotary: Rotary | None = None,
        scale: float | None = None,
        out_name: str = "o_proj",
        norms: HeadNorms | None = None,
        in_features: int | None = None,
    ):
        self.kv_index = kv_index  # which of the cache's keys and values is this layer's
        self.num_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden, q_width, kv_width = config.hidden_size, self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        self.widths = [q_width, kv_width, kv_width]
        self.norms, self.table = norms, rotary.table if rotary is not None else None
        self.scale = scale or self.head_dim**-0.5
        names = [f"{name}.{part}_proj" for part in "qkv"]
        self.qkv_proj = Linear(weights, names, in_features or hidden, self.widths, bias)
        self.o_proj = self.last = Linear(weights, f"{name}.{out_name}", q_width, hidden, bias)

    def linears(self) -> list[Linear]:
        return [self.qkv_proj, self.o_proj]

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        keys, values = context.cache.keys[self.kv_index], context.cache.values[self.kv_index]
        query, key, value = (t.unflatten(1, (-1, self.head_dim)) for t in self.qkv_proj(x).split(self.widths, dim=1))
        place_heads(query, key, value, keys, values, context.slot_mapping, context.positions, self.norms, self.table)
        attention = context.attention
        if context.outputs is not None:
            query = gather_rows(query.flatten(1), context.outputs.tokens).unflatten(1, (-1, self.head_dim))
            attention = context.outputs.attention
        y = paged_attention_varlen(query, keys, values, attention, self.scale)
        return self.o_proj(y.flatten(1))


class MLP:
    """down(act(up(x))), without a gate."""

    def __init__(self, config, weights: Weights, name: str):
        self.activation = config.mlp_hidden_act
        self.up_proj = Linear(weights, f"{name}.up_proj", config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = self.last = Linear(
            weights, f"{name}.down_proj", config.intermediate_size, config.hidden_size, config.mlp_bias
        )

    def linears(self) -> list[Linear]:
        return [self.up_proj, self.down_proj]

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.down_proj(self.up_proj(x, self.activation))
