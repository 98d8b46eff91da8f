"""Falcon-H1: every layer runs Mamba-2 and rotary attention side by side, then a gated MLP; many multipliers.

Names, shapes and formulas follow transformers' `FalconH1ForCausalLM`. Where each multiplier went: the embedding's and
the logits' see `mamba2_decoder`; those of the conv's channels are in its fp32 weight; that of keys and the square of
the attention's input are in the scale of the scores; those of gates and outputs in the kernel that applies the gate,
relative to the attention's output, by which the residual stream is divided. Only dt and a normed gate are multiplied
as they are computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mambalign.kernels.gate_mul import gate_mul
from mambalign.kernels.rms_norm import rms_norm, rms_norm_gated
from mambalign.worker.models.layers import Attention, ForwardContext, Linear, Mamba2Mixer
from mambalign.worker.models.loader import CheckpointError, Weights
from mambalign.worker.models.mamba2_decoder import PARALLEL, Mamba2Decoder, Mamba2DecoderConfig
from mambalign.worker.models.rotary import Rotary, RotaryConfig


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(Mamba2DecoderConfig):
    MULTIPLIERS: ClassVar[tuple[str, ...]] = (
        "lm_head_multiplier",
        "embedding_multiplier",
        "mlp_multipliers",
        "key_multiplier",
        "attention_in_multiplier",
        "attention_out_multiplier",
        "ssm_multipliers",
        "ssm_in_multiplier",
        "ssm_out_multiplier",
    )

    mamba_rms_norm: bool = False  # else the gate is applied alone
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False  # of the mixer's out_proj
    lm_head_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    mlp_multipliers: tuple[float, ...] = (1.0, 1.0)  # of the gate, of the output
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, ...] = (1.0,) * 5  # of gate, x, B, C, dt
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0

    @property
    def stream_divisor(self) -> float:
        """The factor of the attention's output, of its input's scale too."""
        return self.attention_in_multiplier * self.attention_out_multiplier

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "FalconH1Config":
        """Read a published config.json. Raises CheckpointError for what cannot be served, naming the field."""
        lists = {
            name: tuple(config[name]) for name in ("mlp_multipliers", "ssm_multipliers") if config.get(name) is not None
        }
        for name, values in lists.items():
            if len(values) != len(getattr(cls, name)):
                raise CheckpointError(f"config.json: {name} = {values}; served: {len(getattr(cls, name))} of them")
        layers = [PARALLEL] * (config.get("num_hidden_layers") or 32)
        parsed = cls.read(config, layers, config.get("mamba_d_ssm", 1024), **lists)
        rotary = RotaryConfig.from_json(config, parsed.head_dim, parsed.max_position_embeddings)
        return replace(parsed, rotary=rotary)


class FalconH1Mixer(Mamba2Mixer):
    """Mamba-2 with a multiplier for each part of its projected input, and a gate with or without a norm."""

    def __init__(self, config: FalconH1Config, weights: Weights, name: str, state_index: int):
        gate, x, B, C, dt = (each * config.ssm_in_multiplier for each in config.ssm_multipliers)
        self.gate_scale, self.dt_scale = gate, dt
        self.scale = config.ssm_out_multiplier / config.stream_divisor
        super().__init__(config, weights, name, state_index, config.projectors_bias)
        group_width = self.num_groups * self.d_state
        scales = [(x, self.width), (B, group_width), (C, group_width)]
        self.conv_weight = self.conv_weight * torch.cat(
            [self.conv_weight.new_full((width,), each) for each, width in scales]
        )
        if self.in_proj.bias is not None:
            self.in_proj.bias = self.in_proj.bias / config.ssm_in_multiplier
        if self.out_proj.bias is not None:
            self.out_proj.bias = self.out_proj.bias * self.scale

    def gate_norm(self, config: FalconH1Config, weights: Weights, name: str) -> Callable:
        if not config.mamba_rms_norm:
            return lambda y, gate: gate_mul(gate, y, self.gate_scale, self.scale)
        weight = weights.take(f"{name}.weight", (self.width,), torch.float32) * self.scale
        eps, group_width = config.rms_norm_eps, self.width // self.num_groups
        if not config.mamba_norm_before_gate:
            return lambda y, gate: rms_norm_gated(y, gate * self.gate_scale, weight, eps, group_width)
        ones = weight.new_ones(group_width)

        def norm_then_gate(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            normed = rms_norm(y.reshape(-1, group_width), ones, eps).view_as(y)
            return gate_mul(gate, normed * weight, self.gate_scale)

        return norm_then_gate

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, xbc, dt = super().project(x)
        return gate, xbc, dt if self.dt_scale == 1.0 else dt * self.dt_scale


class SideBySide:
    """The sum of both mixers over one input."""

    def __init__(self, mamba: FalconH1Mixer, attention: Attention):
        self.mamba, self.attention = mamba, attention

    def linears(self) -> list[Linear]:
        return [*self.mamba.linears(), *self.attention.linears()]

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.mamba(x, context) + self.attention(x, context)


class FalconH1(Mamba2Decoder):
    """The family's model."""

    Config = FalconH1Config
    norm_names = ("input_layernorm", "pre_ff_layernorm")
    final_norm_name = "model.final_layernorm"

    def __init__(self, config: FalconH1Config, weights: Weights):
        self.rotary = Rotary(config.rotary, weights.device)
        super().__init__(config, weights, config.embedding_multiplier, config.stream_divisor, config.lm_head_multiplier)

    def mixer(self, weights: Weights, name: str, kind: str, kv_index: int, state_index: int):
        config, scale_in = self.config, self.config.attention_in_multiplier
        scale = config.head_dim**-0.5 * config.key_multiplier * scale_in**2
        attention = Attention(config, weights, f"{name}.self_attn", kv_index, config.attention_bias, self.rotary, scale)
        for linear in attention.linears() if config.attention_bias else ():
            linear.bias = linear.bias / scale_in
        return SideBySide(FalconH1Mixer(config, weights, f"{name}.mamba", state_index), attention)

    def mlp(self, weights: Weights, name: str):
        gate, out = self.config.mlp_multipliers
        scale = out / self.config.stream_divisor
        mlp = self.feed_forward(weights, name, gate_scale=gate, scale=scale)
        if mlp.down_proj.bias is not None:
            mlp.down_proj.bias = mlp.down_proj.bias * scale
        return mlp
