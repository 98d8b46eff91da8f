"""LFM2 (arXiv 2511.23404): gated short convs and rotary attention with normed heads, each before a gated MLP.

Names, shapes and formulas follow transformers' `Lfm2ForCausalLM`. No layer has a temporal state: what is kept of a
text, beside keys and values, is the window of each conv.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from mambalign.kernels.causal_conv1d import MAX_WIDTH
from mambalign.kernels.head_norm import HeadNorms
from mambalign.worker.mamba_columns import cdiv
from mambalign.worker.models.gated_mlp import GatedMLP
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.layers import Attention, ForwardContext, RMSNorm
from mambalign.worker.models.loader import CheckpointError, Weights
from mambalign.worker.models.published_config import layer_kinds, published_fields
from mambalign.worker.models.residual import ResidualBlock, run_blocks
from mambalign.worker.models.rotary import Rotary, RotaryConfig
from mambalign.worker.models.short_conv import GatedShortConv
from mambalign.worker.state_cache import AttentionSpec, StateSpec

CONV, ATTENTION = "conv", "full_attention"  # as in `layer_types`
THETA = 1_000_000.0  # unless config.json says otherwise


@dataclass(frozen=True, kw_only=True)
class Lfm2Config:
    """The fields that shape the computation, under their published names, with transformers' defaults."""

    OLDER_NAMES: ClassVar[dict[str, str]] = {  # of fields; they win where both are there
        "tie_embedding": "tie_word_embeddings",
        "block_ff_dim": "intermediate_size",
    }

    layer_types: tuple[str, ...]
    head_dim: int
    rotary: RotaryConfig
    vocab_size: int = 65536
    hidden_size: int = 2560
    intermediate_size: int = 12288
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float = 1.0
    block_multiple_of: int = 256
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    conv_L_cache: int = 3
    conv_bias: bool = False
    norm_eps: float = 1e-5
    max_position_embeddings: int = 128_000
    tie_word_embeddings: bool = True
    eos_token_id: tuple[int, ...] = (2,)

    @property
    def conv_width(self) -> int:
        return self.conv_L_cache

    @property
    def mlp_width(self) -> int:
        """Of the MLPs: two thirds of what is published, times a factor, rounded up, unless that is switched off."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        width = int(self.block_ffn_dim_multiplier * int(2 * self.intermediate_size / 3))
        return cdiv(width, self.block_multiple_of) * self.block_multiple_of

    def attention_specs(self, dtype: torch.dtype, with_drafter: bool) -> list[AttentionSpec]:
        """KV shape of each attention layer."""
        count = self.layer_types.count(ATTENTION)
        return [AttentionSpec(f"attention.{i}", self.num_key_value_heads, self.head_dim, dtype) for i in range(count)]

    def state_specs(self, dtype: torch.dtype, temporal_dtype: torch.dtype, with_drafter: bool) -> list[StateSpec]:
        """Conv state of each conv layer."""
        count = self.layer_types.count(CONV)
        return [StateSpec(f"conv.{i}", "conv", (self.hidden_size,), dtype) for i in range(count)]

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        """Read a published config.json. Raises CheckpointError for what cannot be served, naming the field."""
        older = ((name, config.get(old)) for old, name in cls.OLDER_NAMES.items())
        config = config | {name: value for name, value in older if value is not None}
        given = published_fields(cls, config) | {"layer_types": _layer_types(config)}
        try:
            hidden, heads = (given.get(name, getattr(cls, name)) for name in ("hidden_size", "num_attention_heads"))
            head_dim = given.setdefault("head_dim", hidden // heads)
            positions = given.get("max_position_embeddings", cls.max_position_embeddings)
            theta = {"rope_theta": config.get("rope_theta") or THETA}
            parsed = cls(**given, rotary=RotaryConfig.from_json(config | theta, head_dim, positions))
        except TypeError as error:
            raise CheckpointError(f"config.json: {error}") from error
        if not 2 <= parsed.conv_L_cache <= MAX_WIDTH:
            raise CheckpointError(f"config.json: conv_L_cache = {parsed.conv_L_cache}; served: 2 to {MAX_WIDTH}")
        return parsed


def _layer_types(config: dict[str, Any]) -> tuple[str, ...]:
    """Kind of each layer, from `layer_types` or from the older list of the layers with attention: without one, all."""
    kinds, attention = config.get("layer_types"), config.get("full_attn_idxs")
    if kinds is None:
        count = config.get("num_hidden_layers") or 32
        if any(i not in range(count) for i in attention or ()):
            raise CheckpointError(f"config.json: full_attn_idxs = {attention} of {count} layers")
        kinds = [ATTENTION if attention is None or i in attention else CONV for i in range(count)]
    kinds = layer_kinds(kinds, (CONV, ATTENTION))
    for kind in (CONV, ATTENTION):
        if kind not in kinds:
            raise CheckpointError(f"config.json: no layer of {kind} among {len(kinds)}; hybrid models are served")
    return kinds


class Lfm2(HybridModel):
    """The family's model."""

    Config = Lfm2Config
    chunk_tokens = None

    def __init__(self, config: Lfm2Config, weights: Weights):
        super().__init__(config, weights)
        self.rotary = Rotary(config.rotary, weights.device)
        hidden, eps = config.hidden_size, config.norm_eps
        self.blocks = []
        for i, kind in enumerate(config.layer_types):
            name, index = f"model.layers.{i}", config.layer_types[:i].count(kind)
            parts = self.mixer(weights, name, kind, index), self.mlp(weights, f"{name}.feed_forward", i)
            for norm, part in zip(("operator_norm", "ffn_norm"), parts, strict=True):
                self.blocks.append(ResidualBlock(RMSNorm(weights, f"{name}.{norm}", hidden, eps), part))
        self.final_norm = RMSNorm(weights, "model.embedding_norm", hidden, eps)

    def run(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return run_blocks(self.blocks, self.final_norm, x, context)

    def mixer(self, weights: Weights, name: str, kind: str, index: int) -> GatedShortConv | Attention:
        """The mixer of the layer `name`; its conv state, or its keys, are the cache's `index`th."""
        if kind == CONV:
            return GatedShortConv(self.config, weights, f"{name}.conv", index)
        name, width, eps = f"{name}.self_attn", self.config.head_dim, self.config.norm_eps
        norms = (RMSNorm(weights, f"{name}.{part}_layernorm", width, eps) for part in "qk")
        norms = HeadNorms(*(norm.weight for norm in norms), eps)
        return Attention(self.config, weights, name, index, False, self.rotary, out_name="out_proj", norms=norms)

    def mlp(self, weights: Weights, name: str, layer: int) -> GatedMLP:
        """What follows the mixer of the layer of that number."""
        gate_up = [f"{name}.w1", f"{name}.w3"]
        return GatedMLP(weights, gate_up, f"{name}.w2", self.config.hidden_size, self.config.mlp_width)
