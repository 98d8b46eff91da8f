"""Qwen3-Next: layers of gated DeltaNet or gated attention, each followed by an MLP or a mixture; and its MTP head.

Names, shapes and order of operations follow transformers' `Qwen3NextForCausalLM`; the head's follow the published
checkpoints (`mtp.*`): fc over the norms of embedding and hidden state, a layer with attention, a final norm.
"""

from dataclasses import dataclass
from typing import Any

import torch

from mambalign.kernels.chunk_shape import DELTA_CHUNK
from mambalign.kernels.expert_routing import Routing
from mambalign.kernels.gated_delta_chunk_scan import chunks_are_right
from mambalign.worker.models.gated_attention import GatedAttention
from mambalign.worker.models.gated_delta_net import GatedDeltaNet
from mambalign.worker.models.gated_mlp import GatedMLP
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.layers import ForwardContext, Linear, ZeroCentredRMSNorm
from mambalign.worker.models.loader import CheckpointError, Weights
from mambalign.worker.models.moe import Experts, MoE, Router, stack_experts, take_stacked_experts
from mambalign.worker.models.mtp_head import MtpHead
from mambalign.worker.models.published_config import check_values, layer_kinds, published_fields
from mambalign.worker.models.residual import ResidualBlock, run_blocks
from mambalign.worker.models.rotary import Rotary, RotaryConfig
from mambalign.worker.state_cache import AttentionSpec, StateSpec

DELTA, ATTENTION = "linear_attention", "full_attention"  # as in `layer_types`
ROTATED = 0.25  # of a head's channels, unless config.json says otherwise
SERVED = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),  # of the DeltaNet layers
    "use_sliding_window": (False,),
    "mtp_use_dedicated_embeddings": (False,),
}


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig:
    """The fields of config.json that shape the computation, under their published names."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    rotary: RotaryConfig
    num_mtp_layers: int  # 0: no head
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    intermediate_size: int = 0  # of layers without a mixture
    num_experts: int = 512  # 0: no layer has a mixture
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    linear_conv_kernel_dim: int = 4
    eos_token_id: tuple[int, ...] = ()
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    @property
    def conv_width(self) -> int:
        return self.linear_conv_kernel_dim

    @property
    def linear_key_width(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def routing(self) -> Routing | None:
        """How tokens choose experts, if there are any. Raises ValueError for numbers that do not fit together."""
        if not self.num_experts:
            return None
        return Routing(self.num_experts, self.num_experts_per_tok, sigmoid=False, normalised=self.norm_topk_prob)

    def has_mixture(self, layer: int) -> bool:
        """Whether the layer of that number of the target is followed by a mixture of experts."""
        is_dense = layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step
        return self.num_experts > 0 and not is_dense

    def attention_specs(self, dtype: torch.dtype, with_drafter: bool) -> list[AttentionSpec]:
        """KV shape of each attention layer: the target's, then the drafter's. Needs no weight."""
        count = self.layer_types.count(ATTENTION) + (self.num_mtp_layers if with_drafter else 0)
        return [AttentionSpec(f"attention.{i}", self.num_key_value_heads, self.head_dim, dtype) for i in range(count)]

    def state_specs(self, dtype: torch.dtype, temporal_dtype: torch.dtype, with_drafter: bool) -> list[StateSpec]:
        """Conv and temporal state of each DeltaNet layer, and the drafter's carry. Needs no weight."""
        specs = []
        conv_dim = 2 * self.linear_key_width + self.linear_value_width
        shape = (self.linear_num_value_heads, self.linear_value_head_dim, self.linear_key_head_dim)
        for i in range(self.layer_types.count(DELTA)):
            specs.append(StateSpec(f"conv.{i}", "conv", (conv_dim,), dtype))
            specs.append(StateSpec(f"temporal.{i}", "temporal", shape, temporal_dtype))
        if with_drafter:
            specs.append(StateSpec("carry", "carry", (self.hidden_size,), dtype))
        return specs

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "Qwen3NextConfig":
        """Read a published config.json. Raises CheckpointError for what cannot be served, naming the field.

        Published files do not say that there is a head: there is one, when the checkpoint holds its weights.
        """
        return cls.read(config, num_mtp_layers=config.get("num_nextn_predict_layers", 1))

    @classmethod
    def read(cls, config: dict[str, Any], **derived: Any) -> "Qwen3NextConfig":
        check_values(config, SERVED)
        if derived["num_mtp_layers"] not in (0, 1):
            raise CheckpointError(f"config.json: {derived['num_mtp_layers']} MTP layers; served: at most 1")
        given = published_fields(cls, config)
        try:
            given["layer_types"] = _layer_types(config)
            given["mlp_only_layers"] = tuple(config.get("mlp_only_layers") or ())
            given["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            positions = config.get("max_position_embeddings", cls.max_position_embeddings)
            given["rotary"] = RotaryConfig.from_json(config, given["head_dim"], positions, ROTATED)
            parsed = cls(**{**given, **derived})
            _ = parsed.routing  # may raise
            if parsed.linear_num_value_heads % parsed.linear_num_key_heads:
                raise ValueError(
                    f"linear_num_value_heads = {parsed.linear_num_value_heads}; served: multiples of "
                    f"linear_num_key_heads = {parsed.linear_num_key_heads}"
                )
            return parsed
        except CheckpointError:
            raise
        except KeyError as error:
            raise CheckpointError(f"config.json lacks {error.args[0]}") from error
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"config.json: {error}") from error


def _layer_types(config: dict[str, Any]) -> tuple[str, ...]:
    given = config.get("layer_types")
    if given is None:
        interval = config.get("full_attention_interval") or 4
        given = [DELTA if (i + 1) % interval else ATTENTION for i in range(config["num_hidden_layers"])]
    return layer_kinds(given, (DELTA, ATTENTION))


class Qwen3Next(HybridModel):
    """The family's model. Subclasses publish other projections, or their weights under another prefix."""

    Config = Qwen3NextConfig
    chunk_tokens = DELTA_CHUNK
    prefix = "model"

    def __init__(self, config: Qwen3NextConfig, weights: Weights):
        self.embedding_name = f"{self.prefix}.embed_tokens.weight"
        super().__init__(config, weights)
        self.rotary = Rotary(config.rotary, weights.device)
        mixtures = [config.has_mixture(i) for i in range(len(config.layer_types))]
        self.blocks = self._layers(weights, f"{self.prefix}.layers", config.layer_types, mixtures, 0)
        self.final_norm = ZeroCentredRMSNorm(weights, f"{self.prefix}.norm", config.hidden_size, config.rms_norm_eps)
        if config.num_mtp_layers and weights.has_any("mtp."):
            self.mtp = self._mtp_head(weights)
        else:
            weights.skip("mtp.")

    def run(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return run_blocks(self.blocks, self.final_norm, x, context)

    def chunks_are_right(self, temporal_dtype: torch.dtype) -> bool:
        config = self.config
        heads = config.linear_num_value_heads, config.linear_num_key_heads
        sizes = config.linear_value_head_dim, config.linear_key_head_dim
        return chunks_are_right(*heads, *sizes, self.dtype, temporal_dtype, self.embedding.device)

    def _mtp_head(self, weights: Weights) -> MtpHead:
        config = self.config
        hidden, eps, first_kv = config.hidden_size, config.rms_norm_eps, config.layer_types.count(ATTENTION)
        return MtpHead(
            embedding_norm=ZeroCentredRMSNorm(weights, "mtp.pre_fc_norm_embedding", hidden, eps),
            hidden_norm=ZeroCentredRMSNorm(weights, "mtp.pre_fc_norm_hidden", hidden, eps),
            fc=Linear(weights, "mtp.fc", 2 * hidden, hidden),
            blocks=self._layers(weights, "mtp.layers", (ATTENTION,), [config.num_experts > 0], first_kv),
            final_norm=ZeroCentredRMSNorm(weights, "mtp.norm", hidden, eps),
        )

    def _layers(
        self, weights: Weights, prefix: str, kinds: tuple[str, ...], mixtures: list[bool], first_kv: int
    ) -> list[ResidualBlock]:
        """Layers of these kinds, those with mixtures; keys of attention are in the cache from `first_kv` on."""
        config, blocks = self.config, []
        for i, kind in enumerate(kinds):
            name = f"{prefix}.{i}"
            if kind == DELTA:
                in_proj = self.delta_in_proj(weights, f"{name}.linear_attn")
                mixer = GatedDeltaNet(config, weights, f"{name}.linear_attn", kinds[:i].count(DELTA), in_proj)
            else:
                kv_index = first_kv + kinds[:i].count(ATTENTION)
                mixer = GatedAttention(config, weights, f"{name}.self_attn", kv_index, self.rotary)
            mlp = self.mlp(weights, f"{name}.mlp", mixtures[i])
            for norm, part in (("input", mixer), ("post_attention", mlp)):
                norm = ZeroCentredRMSNorm(weights, f"{name}.{norm}_layernorm", config.hidden_size, config.rms_norm_eps)
                blocks.append(ResidualBlock(norm, part))
        return blocks

    def delta_in_proj(self, weights: Weights, name: str) -> Linear:
        """Published a key head at a time: its query, key, values and gates; its values' b and a."""
        config = self.config
        per_key_head = config.linear_num_value_heads // config.linear_num_key_heads
        k_dim, values = config.linear_key_head_dim, per_key_head * config.linear_value_head_dim
        widths = [2 * (config.linear_key_width + config.linear_value_width), 2 * config.linear_num_value_heads]
        qkvz, ba = torch.arange(sum(widths)).split(widths)
        parts = qkvz.view(config.linear_num_key_heads, -1).split([k_dim, k_dim, values, values], dim=1)
        parts += ba.view(config.linear_num_key_heads, -1).split([per_key_head, per_key_head], dim=1)
        order = torch.cat([part.flatten() for part in parts])
        return Linear(weights, [f"{name}.in_proj_qkvz", f"{name}.in_proj_ba"], config.hidden_size, widths, order=order)

    def mlp(self, weights: Weights, name: str, is_mixture: bool) -> GatedMLP | MoE:
        config = self.config
        if not is_mixture:
            return gated_mlp(weights, name, config.hidden_size, config.intermediate_size)
        hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        router = Router(weights, f"{name}.gate.weight", hidden, config.routing)
        if f"{name}.experts.gate_up_proj" in weights:
            up = take_stacked_experts(weights, f"{name}.experts.gate_up_proj", count, 2 * inner, hidden)
            down = take_stacked_experts(weights, f"{name}.experts.down_proj", count, hidden, inner)
        else:
            up = stack_experts(weights, f"{name}.experts", ("gate_proj", "up_proj"), count, inner, hidden)
            down = stack_experts(weights, f"{name}.experts", ("down_proj",), count, hidden, inner)
        shared = gated_mlp(weights, f"{name}.shared_expert", hidden, config.shared_expert_intermediate_size)
        shared_gate = Linear(weights, f"{name}.shared_expert_gate", hidden, 1)
        return MoE(router, Experts(up, down, None, gated=True), shared, shared_gate)


def gated_mlp(weights: Weights, name: str, hidden_size: int, intermediate_size: int) -> GatedMLP:
    gate_up = [f"{name}.{part}_proj" for part in ("gate", "up")]
    return GatedMLP(weights, gate_up, f"{name}.down_proj", hidden_size, intermediate_size)
