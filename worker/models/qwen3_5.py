"""Qwen3.5 and 3.6, dense or with experts: the text model, alone or as the text part of a multimodal checkpoint.

As Qwen3-Next, with projections that are published one by one. A text's positions are equal on all three axes of the
multimodal rotary, which makes it the plain one.
"""

from dataclasses import dataclass
from typing import Any

from mambalign.worker.models.layers import Linear
from mambalign.worker.models.loader import Weights
from mambalign.worker.models.qwen3_next import Qwen3Next, Qwen3NextConfig

MULTIMODAL_PREFIX, VISION_PREFIX = "model.language_model", "model.visual."


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(Qwen3NextConfig):
    num_experts: int = 0

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "Qwen35Config":
        """Read a published config.json, or its `text_config`. Raises CheckpointError as `Qwen3NextConfig` does."""
        text = config.get("text_config") or config
        is_tied = text.get("tie_word_embeddings") or config.get("tie_word_embeddings") or False
        return cls.read(text, num_mtp_layers=text.get("mtp_num_hidden_layers", 1), tie_word_embeddings=is_tied)


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(Qwen35Config):
    num_experts: int = 256
    num_experts_per_tok: int = 8


class Qwen35(Qwen3Next):
    """The family's model."""

    Config = Qwen35Config

    def __init__(self, config: Qwen35Config, weights: Weights):
        if weights.has_any(f"{MULTIMODAL_PREFIX}."):
            self.prefix = MULTIMODAL_PREFIX
        super().__init__(config, weights)
        weights.skip(VISION_PREFIX)

    def delta_in_proj(self, weights: Weights, name: str) -> Linear:
        config, names = self.config, [f"{name}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        width, num_heads = config.linear_value_width, config.linear_num_value_heads
        widths = [2 * config.linear_key_width + width, width, num_heads, num_heads]
        return Linear(weights, names, config.hidden_size, widths)


class Qwen35Moe(Qwen35):
    """The variant with experts."""

    Config = Qwen35MoeConfig
