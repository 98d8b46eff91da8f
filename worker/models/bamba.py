"""Bamba: Mamba-2 and rotary attention layers, each followed by a gated MLP.

Names, shapes and formulas follow transformers' `BambaForCausalLM`.
"""

from dataclasses import dataclass, replace
from typing import Any

from mambalign.worker.models.layers import Attention, Mamba2Mixer
from mambalign.worker.models.loader import CheckpointError, Weights
from mambalign.worker.models.mamba2_decoder import ATTENTION, MAMBA, Mamba2Decoder, Mamba2DecoderConfig
from mambalign.worker.models.rotary import Rotary, RotaryConfig

ROTATED = 0.5  # of a head's channels, unless config.json says otherwise


@dataclass(frozen=True, kw_only=True)
class BambaConfig(Mamba2DecoderConfig):
    max_position_embeddings: int = 262144

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "BambaConfig":
        """Read a published config.json. Raises CheckpointError for what cannot be served, naming the field."""
        attention, count = config.get("attn_layer_indices") or [], config.get("num_hidden_layers") or 32
        if any(i not in range(count) for i in attention):
            raise CheckpointError(f"config.json: attn_layer_indices = {attention} of {count} layers")
        parsed = cls.read(config, [ATTENTION if i in attention else MAMBA for i in range(count)])
        rotary = RotaryConfig.from_json(config, parsed.head_dim, parsed.max_position_embeddings, ROTATED)
        return replace(parsed, rotary=rotary)


class Bamba(Mamba2Decoder):
    """The family's model."""

    Config = BambaConfig
    norm_names = ("input_layernorm", "pre_ff_layernorm")
    final_norm_name = "model.final_layernorm"

    def __init__(self, config: BambaConfig, weights: Weights):
        self.rotary = Rotary(config.rotary, weights.device)
        super().__init__(config, weights)

    def mixer(self, weights: Weights, name: str, kind: str, kv_index: int, state_index: int):
        config = self.config
        if kind == MAMBA:
            return Mamba2Mixer(config, weights, f"{name}.mamba", state_index)
        return Attention(config, weights, f"{name}.self_attn", kv_index, config.attention_bias, self.rotary)

    def mlp(self, weights: Weights, name: str):
        return self.feed_forward(weights, name)
