"""Granite 4 hybrid: Mamba-2 and attention layers, each followed by a gated MLP, maybe with experts; four multipliers.

Names, shapes and formulas follow transformers' `GraniteMoeHybridForCausalLM`. Published checkpoints say "mamba" and
"attention" where newer configs say "linear_attention" and "full_attention", and have no positions ("nope") or rotary.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mambalign.kernels.expert_routing import Routing
from mambalign.worker.models.gated_mlp import GatedMLP
from mambalign.worker.models.layers import Attention, Mamba2Mixer
from mambalign.worker.models.loader import CheckpointError, Weights
from mambalign.worker.models.mamba2_decoder import ATTENTION, MAMBA, Mamba2Decoder, Mamba2DecoderConfig
from mambalign.worker.models.moe import Experts, MoE, Router, take_stacked_experts
from mambalign.worker.models.rotary import Rotary, RotaryConfig

LAYER_OF_NAME = {"mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION}


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(Mamba2DecoderConfig):
    MULTIPLIERS: ClassVar[tuple[str, ...]] = (
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )

    shared_intermediate_size: int = 1024
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # of the scores
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0  # divides the logits
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    def routing(self) -> Routing | None:
        """How tokens choose experts, if there are any. Raises ValueError for numbers that do not fit together."""
        if not self.num_local_experts:
            return None
        return Routing(self.num_local_experts, self.num_experts_per_tok, sigmoid=False, normalised=True)

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "GraniteHybridConfig":
        """Read a published config.json. Raises CheckpointError for what cannot be served, naming the field."""
        names = config.get("layer_types") or config.get("layers_block_type")
        names = names or ["mamba"] * (config.get("num_hidden_layers") or 32)
        unknown = sorted({str(name) for name in names} - LAYER_OF_NAME.keys())
        if unknown:
            raise CheckpointError(
                f"config.json: unknown layer kind(s) {', '.join(unknown)}; known: {', '.join(LAYER_OF_NAME)}"
            )
        # this family's default is as many key heads as query heads
        heads = {"num_key_value_heads": config.get("num_key_value_heads") or config.get("num_attention_heads", 32)}
        parsed = cls.read(config | heads, [LAYER_OF_NAME[name] for name in names])
        try:
            parsed.routing()
        except ValueError as error:
            raise CheckpointError(f"config.json: {error}") from error
        if config.get("position_embedding_type") == "rope":
            parsed = replace(
                parsed, rotary=RotaryConfig.from_json(config, parsed.head_dim, parsed.max_position_embeddings)
            )
        return parsed


class GraniteHybrid(Mamba2Decoder):
    """The family's model."""

    Config = GraniteHybridConfig
    norm_names = ("input_layernorm", "post_attention_layernorm")
    final_norm_name = "model.norm"

    def __init__(self, config: GraniteHybridConfig, weights: Weights):
        self.rotary = Rotary(config.rotary, weights.device) if config.rotary else None
        multipliers = config.embedding_multiplier, config.residual_multiplier, 1.0 / config.logits_scaling
        super().__init__(config, weights, *multipliers)

    def mixer(self, weights: Weights, name: str, kind: str, kv_index: int, state_index: int):
        config = self.config
        if kind == MAMBA:
            return Mamba2Mixer(config, weights, f"{name}.mamba", state_index)
        return Attention(
            config,
            weights,
            f"{name}.self_attn",
            kv_index,
            config.attention_bias,
            self.rotary,
            config.attention_multiplier,
        )

    def mlp(self, weights: Weights, name: str):
        config, hidden = self.config, self.config.hidden_size
        gate_up, down = f"{name}.shared_mlp.input_linear", f"{name}.shared_mlp.output_linear"
        shared = GatedMLP(weights, gate_up, down, hidden, config.shared_intermediate_size)
        routing = config.routing()
        if routing is None:
            return shared
        name, count, inner = f"{name}.block_sparse_moe", config.num_local_experts, config.intermediate_size
        router = Router(weights, f"{name}.router.layer.weight", hidden, routing)
        up = take_stacked_experts(weights, f"{name}.input_linear.weight", count, 2 * inner, hidden)
        down = take_stacked_experts(weights, f"{name}.output_linear.weight", count, hidden, inner)
        return MoE(router, Experts(up, down, None, gated=True), shared)
