"""LFM2 with a mixture of experts behind each mixer but the first few, which keep a gated MLP.

Names, shapes and formulas follow transformers' `Lfm2MoeForCausalLM`; experts are published one by one.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from mambalign.kernels.expert_routing import Routing
from mambalign.worker.models.gated_mlp import GatedMLP
from mambalign.worker.models.lfm2 import Lfm2, Lfm2Config
from mambalign.worker.models.loader import CheckpointError, Weights
from mambalign.worker.models.moe import Experts, MoE, Router, stack_experts


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config):
    OLDER_NAMES: ClassVar[dict[str, str]] = {"tie_embedding": "tie_word_embeddings"}

    hidden_size: int = 2048
    intermediate_size: int = 7168  # of the first layers
    num_dense_layers: int = 2
    moe_intermediate_size: int = 1792
    num_experts: int = 32
    num_experts_per_tok: int = 4
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size

    def routing(self) -> Routing:
        """How tokens choose experts. Raises ValueError for numbers that do not fit together."""
        return Routing(
            self.num_experts,
            self.num_experts_per_tok,
            sigmoid=True,
            normalised=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            tiny=1e-6,
        )

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "Lfm2MoeConfig":
        """Read a published config.json. Raises CheckpointError for what cannot be served, naming the field."""
        parsed = super().from_json(config)
        try:
            parsed.routing()
        except ValueError as error:
            raise CheckpointError(f"config.json: {error}") from error
        return parsed


class Lfm2Moe(Lfm2):
    """The family's model with experts."""

    Config = Lfm2MoeConfig

    def mlp(self, weights: Weights, name: str, layer: int) -> GatedMLP | MoE:
        config = self.config
        if layer < config.num_dense_layers:
            return super().mlp(weights, name, layer)
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        bias_name = f"{name}.expert_bias" if config.use_expert_bias else None
        router = Router(weights, f"{name}.gate.weight", hidden, config.routing(), bias_name)
        up = stack_experts(weights, f"{name}.experts", ("w1", "w3"), count, inner, hidden)
        down = stack_experts(weights, f"{name}.experts", ("w2",), count, hidden, inner)
        return MoE(router, Experts(up, down, None, gated=True))
