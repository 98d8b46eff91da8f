"""Zamba2 (arXiv 2411.15242): Mamba-2 layers, before some of which a transformer runs whose weights are shared.

Names, shapes and formulas follow transformers' `Zamba2ForCausalLM`. A shared transformer reads the stream beside the
embeddings; what it makes of them is added to the input of that layer's Mamba alone, not to the stream. Each use of it
has low-rank additions to its projections, and keys and values, of its own.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from mambalign.kernels.chunk_shape import MAMBA2_CHUNK
from mambalign.worker.models.gated_mlp import GatedMLP
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.layers import Attention, ForwardContext, Linear, Mamba2Mixer, RMSNorm
from mambalign.worker.models.loader import CheckpointError, Weights
from mambalign.worker.models.mamba2_decoder import MAMBA, PARALLEL, Mamba2DecoderConfig
from mambalign.worker.models.published_config import check_values, layer_kinds
from mambalign.worker.models.rotary import Rotary, RotaryConfig

LAYER_OF_NAME = {"mamba": MAMBA, "linear_attention": MAMBA, "hybrid": PARALLEL}


@dataclass(frozen=True, kw_only=True)
class Zamba2Config(Mamba2DecoderConfig):
    """Of `layers`, a parallel one is a Mamba-2 layer behind a shared transformer: it has keys and states."""

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("gelu",)
    FIELDS: ClassVar[dict[str, str]] = {  # this family's names of fields that others have too
        "add_bias_linear": "mamba_proj_bias",
        "mamba_ngroups": "mamba_n_groups",
        "n_mamba_heads": "mamba_n_heads",
    }

    mamba_n_heads: int = 8
    mamba_d_state: int = 64
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = True
    time_step_min: float = 0.001
    num_mem_blocks: int = 1  # shared transformers, which take turns
    adapter_rank: int = 128
    use_shared_attention_adapter: bool = False

    @property
    def layer_norm_epsilon(self) -> float:
        """Of the gated norm, whatever the other norms have."""
        return 1e-5

    @property
    def attention_width(self) -> int:
        """Channels that a shared transformer reads: the stream's and the embeddings'."""
        return 2 * self.hidden_size

    def turn_of(self, index: int) -> int:
        """Which shared transformer the `index`th use is of. An untied head means untied transformers, too."""
        return index % self.num_mem_blocks if self.tie_word_embeddings else index

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        """Read a published config.json. Raises CheckpointError for what cannot be served, naming the field."""
        config = {name: value for name, value in config.items() if value is not None}
        check_values(config, {"use_long_context": (False,)})
        for field in ("hidden_size", "layers_block_type"):
            if field not in config:
                raise CheckpointError(f"config.json lacks {field}")
        kinds = layer_kinds(config["layers_block_type"], LAYER_OF_NAME, "layers_block_type")
        layers = [LAYER_OF_NAME[kind] for kind in kinds]
        hybrid_ids = [i for i, kind in enumerate(layers) if kind == PARALLEL]
        check_values(config, {"hybrid_layer_ids": (hybrid_ids,)})
        hidden, heads = config["hidden_size"], config.get("num_attention_heads", cls.num_attention_heads)
        divided = {
            "num_attention_heads": (heads, 2 * hidden),
            "n_mamba_heads": (config.get("n_mamba_heads", cls.mamba_n_heads), config.get("mamba_expand", 2) * hidden),
        }
        for field, (count, width) in divided.items():
            if count < 1 or width % count:
                raise CheckpointError(f"config.json: {field} = {count} of {width} channels; served: a divisor")
        derived = {
            "head_dim": 2 * hidden // heads,
            "num_key_value_heads": config.get("num_key_value_heads", heads),
            "intermediate_size": config.get("intermediate_size", 4 * hidden),
        }
        renamed = {name: config[own] for own, name in cls.FIELDS.items() if own in config}
        parsed = cls.read(config | renamed | derived, layers)
        if parsed.use_shared_attention_adapter and parsed.num_key_value_heads != heads:
            raise CheckpointError(
                f"config.json: use_shared_attention_adapter with num_key_value_heads = {parsed.num_key_value_heads}; "
                f"served: {heads}"
            )
        if parsed.num_mem_blocks < 1:
            raise CheckpointError(f"config.json: num_mem_blocks = {parsed.num_mem_blocks}; served: 1 and more")
        if not config.get("use_mem_rope"):
            return parsed
        return replace(parsed, rotary=RotaryConfig.from_json(config, parsed.head_dim, parsed.max_position_embeddings))


class AdaptedLinear:
    """A shared linear layer and what one use of it adds: to each part of its output, a product of low rank.

    names: of the additions, in the order of the parts, whose widths are `widths`.
    """

    def __init__(self, shared: Linear, weights: Weights, names: list[str], rank: int, widths: list[int]):
        self.shared, self.rank, self.widths = shared, rank, widths
        in_features = shared.weight.shape[0]
        self.down = Linear(weights, [f"{name}.0" for name in names], in_features, [rank] * len(names))
        self.up = [Linear(weights, f"{name}.1", rank, width) for name, width in zip(names, widths, strict=True)]

    def linears(self) -> list[Linear]:
        return [self.shared, self.down, *self.up]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y, low = self.shared(x), self.down(x).split(self.rank, dim=1)
        for part, up, each in zip(y.split(self.widths, dim=1), self.up, low, strict=True):
            part += up(each)
        return y


class SharedTransformer:
    """Attention and a gated MLP, one after the other without a residual between: the weights that all uses share."""

    def __init__(self, config: Zamba2Config, weights: Weights, name: str, rotary: Rotary | None):
        width, hidden, eps, bias = config.attention_width, config.hidden_size, config.rms_norm_eps, config.use_bias
        self.attention_adapters = [f"{name}.self_attn.linear_{part}_adapter_list" for part in "qkv"]
        self.mlp_adapters = [f"{name}.feed_forward.gate_up_proj_adapter_list"]
        self.attention_norm = RMSNorm(weights, f"{name}.input_layernorm", width, eps)
        self.attention = Attention(
            config,
            weights,
            f"{name}.self_attn",
            kv_index=0,
            rotary=rotary,
            scale=(config.head_dim / 2) ** -0.5,
            in_features=width,
        )
        self.mlp_norm = RMSNorm(weights, f"{name}.pre_ff_layernorm", hidden, eps)
        gate_up, down = (f"{name}.feed_forward.{part}_proj" for part in ("gate_up", "down"))
        self.mlp = GatedMLP(weights, gate_up, down, hidden, config.intermediate_size, bias, activation="gelu")


class SharedUse:
    """The `index`th use of a shared transformer, with the additions and the projection back of the layer `name`."""

    def __init__(self, config: Zamba2Config, weights: Weights, name: str, shared: SharedTransformer, index: int):
        self.attention_norm, self.mlp_norm = shared.attention_norm, shared.mlp_norm
        self.attention, self.mlp = copy(shared.attention), copy(shared.mlp)
        self.attention.kv_index = index
        rank = config.adapter_rank
        if config.use_shared_attention_adapter:
            names = [f"{adapters}.{index}" for adapters in shared.attention_adapters]
            qkv = AdaptedLinear(shared.attention.qkv_proj, weights, names, rank, shared.attention.widths)
            self.attention.qkv_proj = qkv
        names, widths = [f"{adapters}.{index}" for adapters in shared.mlp_adapters], [2 * config.intermediate_size]
        self.mlp.gate_up_proj = AdaptedLinear(shared.mlp.gate_up_proj, weights, names, rank, widths)
        self.linear = Linear(weights, f"{name}.linear", config.hidden_size, config.hidden_size)
        self.linear.is_summed = True

    def linears(self) -> list[Linear]:
        layers = [*self.attention.linears(), *self.mlp.linears(), self.linear]
        return [one for each in layers for one in (each.linears() if isinstance(each, AdaptedLinear) else [each])]

    def __call__(self, x: torch.Tensor, embeddings: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x, embeddings [T, hidden] -> what `linear` returns, for a norm of a sum to read."""
        both = torch.cat([x, embeddings], dim=1)
        attended = self.attention(self.attention_norm(both), context)
        return self.linear(self.mlp(self.mlp_norm(attended), context))


class Zamba2Layer:
    """x + mamba(norm(x)), or x + mamba(norm(x + shared(x, embeddings))) where a shared transformer is used."""

    def __init__(self, config: Zamba2Config, weights: Weights, name: str, state_index: int, shared: SharedUse | None):
        name = name if shared is None else f"{name}.mamba_decoder"
        self.norm = RMSNorm(weights, f"{name}.input_layernorm", config.hidden_size, config.rms_norm_eps)
        self.mixer = Mamba2Mixer(config, weights, f"{name}.mamba", state_index)
        self.shared = shared

    def linears(self) -> list[Linear]:
        return [*self.mixer.linears(), *(self.shared.linears() if self.shared else [])]


class Zamba2(HybridModel):
    """The family's model."""

    Config = Zamba2Config
    chunk_tokens = MAMBA2_CHUNK

    def __init__(self, config: Zamba2Config, weights: Weights):
        super().__init__(config, weights)
        rotary = Rotary(config.rotary, weights.device) if config.rotary else None
        transformers: list[SharedTransformer] = []
        self.blocks = []
        for i, kind in enumerate(config.layers):
            name, use = f"model.layers.{i}", None
            if kind == PARALLEL:
                index, shared_name = config.layers[:i].count(PARALLEL), f"{name}.shared_transformer"
                turn = config.turn_of(index)
                if turn == len(transformers):  # its weights have the name of the layer that is the first to use it
                    transformers.append(SharedTransformer(config, weights, shared_name, rotary))
                else:
                    weights.skip(f"{shared_name}.")  # the same weights again, where a checkpoint repeats them
                use = SharedUse(config, weights, name, transformers[turn], index)
            self.blocks.append(Zamba2Layer(config, weights, name, i, use))
        for block, following in zip(self.blocks, [*self.blocks[1:], None], strict=True):
            block.mixer.last.is_summed = following is None or following.shared is None  # by the norm that comes next
        self.final_norm = RMSNorm(weights, "model.final_layernorm", config.hidden_size, config.rms_norm_eps)
        for turn, shared in enumerate(transformers):
            others = [index for index in range(config.layers.count(PARALLEL)) if config.turn_of(index) != turn]
            for index in others:  # an untied transformer has additions for the uses it would have in turns
                for adapters in (*shared.attention_adapters, *shared.mlp_adapters):
                    weights.skip(f"{adapters}.{index}.")

    def run(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        embeddings, mixed = x, None
        for block in self.blocks:
            if block.shared is not None:
                x = x if mixed is None else x + mixed
                normed, _ = block.norm.of_sum(block.shared(x, embeddings, context), x)
            elif mixed is None:
                normed = block.norm(x)
            else:
                normed, x = block.norm.of_sum(mixed, x)
            mixed = block.mixer(normed, context)
        return self.final_norm.of_sum(mixed, x)[0]
