"""Nemotron-H and Nemotron 3: Mamba-2, attention, MLP and mixtures of experts, each behind one norm and one residual;
and their MTP head.

Names, shapes and order of operations follow transformers' `NemotronHForCausalLM`; the head's follow the published
checkpoints (`mtp.layers.*`). The layer pattern comes as letters ("M-M*E") or as a list of names, old or new.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from mambalign.kernels.activation import ACTIVATIONS
from mambalign.kernels.chunk_shape import MAMBA2_CHUNK
from mambalign.kernels.expert_routing import Routing
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.layers import MLP, Attention, ForwardContext, Linear, Mamba2Mixer, RMSNorm
from mambalign.worker.models.loader import CheckpointError, Weights
from mambalign.worker.models.moe import Experts, MoE, Router, stack_experts
from mambalign.worker.models.mtp_head import MtpHead
from mambalign.worker.models.published_config import check_values, published_fields
from mambalign.worker.models.residual import ResidualBlock, run_blocks
from mambalign.worker.state_cache import AttentionSpec, StateSpec

MAMBA, ATTENTION, MLP_LAYER, MOE = "mamba", "attention", "mlp", "moe"
LAYER_OF_LETTER = {"M": MAMBA, "*": ATTENTION, "-": MLP_LAYER, "E": MOE}
LAYER_OF_NAME = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP_LAYER,
    "moe": MOE,
}
MTP_DEFAULT = ("attention", "moe")  # transformers', where a head is announced and its layers are not
OLD_NAMES = {  # fields of earlier configurations, under the names that they have now
    "attention_head_dim": "head_dim",
    "layer_types": "layers_block_type",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_n_groups": "n_groups",
    "norm_eps": "layer_norm_epsilon",
    "num_local_experts": "n_routed_experts",
}
SERVED = {  # values of fields that must be one of these
    "mamba_hidden_act": ("silu", "swish"),
    "mlp_hidden_act": tuple(ACTIVATIONS),
    "attention_bias": (False,),
    "sliding_window": (None,),
    "n_shared_experts": (1,),
    "mamba_proj_bias": (False,),
}


@dataclass(frozen=True)
class NemotronHConfig:
    """The fields of config.json that shape the computation, under their published names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[str, ...]
    mtp_layers: tuple[str, ...]  # empty without a head
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int
    eos_token_id: tuple[int, ...] = ()
    max_position_embeddings: int = 4096
    conv_kernel: int = 4
    time_step_min: float = 0.001
    layer_norm_epsilon: float = 1e-5
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    use_bias: bool = False
    use_conv_bias: bool = True
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0
    n_routed_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None  # width between the projections around the experts
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    @property
    def conv_width(self) -> int:
        return self.conv_kernel

    @property
    def mamba_width(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the conv: x, B and C."""
        return self.mamba_width + 2 * self.n_groups * self.ssm_state_size

    def routing(self) -> Routing:
        """How tokens choose experts. Raises ValueError for numbers that do not fit together."""
        return Routing(
            self.n_routed_experts,
            self.num_experts_per_tok,
            sigmoid=True,
            normalised=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            num_groups=self.n_group,
            top_groups=self.topk_group,
        )

    def attention_specs(self, dtype: torch.dtype, with_drafter: bool) -> list[AttentionSpec]:
        """KV shape of each attention layer: the target's, then the drafter's. Needs no weight."""
        kinds = self.layers + (self.mtp_layers if with_drafter else ())
        names = [f"attention.{i}" for i in range(kinds.count(ATTENTION))]
        return [AttentionSpec(name, self.num_key_value_heads, self.head_dim, dtype) for name in names]

    def state_specs(self, dtype: torch.dtype, temporal_dtype: torch.dtype, with_drafter: bool) -> list[StateSpec]:
        """Conv and temporal state of each Mamba layer, and the drafter's carry. Needs no weight."""
        specs = []
        temporal_shape = (self.mamba_num_heads, self.mamba_head_dim, self.ssm_state_size)
        for i in range(self.layers.count(MAMBA)):
            specs.append(StateSpec(f"conv.{i}", "conv", (self.conv_dim,), dtype))
            specs.append(StateSpec(f"temporal.{i}", "temporal", temporal_shape, temporal_dtype))
        if with_drafter:
            specs.append(StateSpec("carry", "carry", (self.hidden_size,), dtype))
        return specs

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "NemotronHConfig":
        """Read a published config.json. Raises CheckpointError for what cannot be served, naming the field."""
        config = {name: value for name, value in config.items() if value is not None}
        config = {OLD_NAMES[name]: config[name] for name in OLD_NAMES if name in config} | config
        check_values(config, SERVED)
        derived = {"layers": _layers(config, "hybrid_override_pattern", "layers_block_type"), "mtp_layers": ()}
        if config.get("num_nextn_predict_layers"):
            pattern, names = "mtp_hybrid_override_pattern", "mtp_layers_block_type"
            given = config if config.get(pattern) or config.get(names) else {names: MTP_DEFAULT}
            derived["mtp_layers"] = _layers(given, pattern, names)
        try:
            parsed = cls(**{**published_fields(cls, config), **derived})
        except TypeError as error:
            raise CheckpointError(f"config.json: {error}") from error
        if MAMBA in parsed.mtp_layers:
            raise CheckpointError("config.json: an MTP head with Mamba layers is not served")
        if MOE in parsed.layers + parsed.mtp_layers:
            for name in ("n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"):
                if not getattr(parsed, name):
                    raise CheckpointError(f"config.json has layers of experts and no {name}")
            try:
                parsed.routing()
            except ValueError as error:
                raise CheckpointError(f"config.json: {error}") from error
        return parsed


def _layers(config: dict[str, Any], pattern_field: str, list_field: str) -> tuple[str, ...]:
    """Layer kinds from a list of names, else from a pattern of letters."""
    given, kinds = config.get(list_field), LAYER_OF_NAME
    if given is None:
        given, kinds = config.get(pattern_field), LAYER_OF_LETTER
    if not given:
        raise CheckpointError(f"config.json has neither {list_field} nor {pattern_field}")
    unknown = sorted({str(kind) for kind in given} - kinds.keys())
    if unknown:
        raise CheckpointError(f"config.json: unknown layer kind(s) {', '.join(unknown)}; known: {', '.join(kinds)}")
    return tuple(kinds[kind] for kind in given)


class NemotronH(HybridModel):
    """The family's model: every layer is one mixer behind one norm."""

    Config = NemotronHConfig
    chunk_tokens = MAMBA2_CHUNK
    embedding_name = "backbone.embeddings.weight"

    def __init__(self, config: NemotronHConfig, weights: Weights):
        super().__init__(config, weights)
        self.blocks = _blocks(config, weights, "backbone.layers", config.layers, 0)
        self.final_norm = RMSNorm(weights, "backbone.norm_f", config.hidden_size, config.layer_norm_epsilon)
        if config.mtp_layers and weights.has_any("mtp."):
            self.mtp = _mtp_head(config, weights)
            for i in range(1, config.num_nextn_predict_layers):  # heads for later drafts: the first one makes them all
                for layer in range(len(config.mtp_layers)):
                    weights.skip(f"mtp.layers.{i * len(config.mtp_layers) + layer}.")
        else:
            weights.skip("mtp.")

    def run(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return run_blocks(self.blocks, self.final_norm, x, context)


def _mtp_head(config: NemotronHConfig, weights: Weights) -> MtpHead:
    hidden, eps = config.hidden_size, config.layer_norm_epsilon
    first, last = "mtp.layers.0", f"mtp.layers.{len(config.mtp_layers) - 1}"
    return MtpHead(
        embedding_norm=RMSNorm(weights, f"{first}.enorm", hidden, eps),
        hidden_norm=RMSNorm(weights, f"{first}.hnorm", hidden, eps),
        fc=Linear(weights, f"{first}.eh_proj", 2 * hidden, hidden),
        blocks=_blocks(config, weights, "mtp.layers", config.mtp_layers, config.layers.count(ATTENTION)),
        final_norm=RMSNorm(weights, f"{last}.final_layernorm", hidden, eps),
    )


def _blocks(
    config: NemotronHConfig, weights: Weights, prefix: str, kinds: tuple[str, ...], first_kv_index: int
) -> list[ResidualBlock]:
    blocks = []
    for i, kind in enumerate(kinds):
        name = f"{prefix}.{i}"
        if kind == MAMBA:
            mixer = Mamba2Mixer(config, weights, f"{name}.mixer", kinds[:i].count(MAMBA))
        elif kind == ATTENTION:
            mixer = Attention(config, weights, f"{name}.mixer", first_kv_index + kinds[:i].count(ATTENTION))
        elif kind == MOE:
            mixer = _mixture(config, weights, f"{name}.mixer")
        else:
            mixer = MLP(config, weights, f"{name}.mixer")
        norm = RMSNorm(weights, f"{name}.norm", config.hidden_size, config.layer_norm_epsilon)
        blocks.append(ResidualBlock(norm, mixer))
    return blocks


def _mixture(config: NemotronHConfig, weights: Weights, name: str) -> MoE:
    """Experts without a gate, a shared one beside them, and maybe projections around them."""
    hidden, inner, latent = config.hidden_size, config.moe_intermediate_size, config.moe_latent_size
    width, count = latent or hidden, config.n_routed_experts
    router = Router(weights, f"{name}.gate.weight", hidden, config.routing(), f"{name}.gate.e_score_correction_bias")
    up = stack_experts(weights, f"{name}.experts", ["up_proj"], count, inner, width)
    down = stack_experts(weights, f"{name}.experts", ["down_proj"], count, width, inner)
    shared = replace(config, intermediate_size=config.moe_shared_expert_intermediate_size)
    around = None
    if latent:
        around = (
            Linear(weights, f"{name}.fc1_latent_proj", hidden, latent, config.mlp_bias),
            Linear(weights, f"{name}.fc2_latent_proj", latent, hidden, config.mlp_bias),
        )
    return MoE(
        router,
        Experts(up, down, config.mlp_hidden_act),
        shared=MLP(shared, weights, f"{name}.shared_experts"),
        latent=around,
    )
