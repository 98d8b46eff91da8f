"""What Granite 4 hybrid, Bamba and Falcon-H1 share: fields of config.json, and layers of a mixer and an MLP. Zamba2 has
the fields alone.

Multipliers cost nothing while serving. A residual stream that is divided by c as a whole computes the same, because its
norms forget its scale: with every eps over c squared, x + c * f(norm(x)) becomes x / c + f(norm(x / c)). So c goes into
the embedding, and the factor of the logits into the final norm, whose weight is fp32.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from mambalign.kernels.chunk_shape import MAMBA2_CHUNK
from mambalign.worker.models.gated_mlp import GatedMLP
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.layers import ForwardContext, RMSNorm
from mambalign.worker.models.loader import CheckpointError, Weights
from mambalign.worker.models.published_config import check_values, published_fields
from mambalign.worker.models.residual import ResidualBlock, run_blocks
from mambalign.worker.models.rotary import RotaryConfig
from mambalign.worker.state_cache import AttentionSpec, StateSpec

MAMBA, ATTENTION, PARALLEL = "mamba", "attention", "parallel"  # kinds of mixer; a parallel one is both


@dataclass(frozen=True, kw_only=True)
class Mamba2DecoderConfig:
    """The fields that shape the computation, under their published names, with transformers' defaults."""

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("silu", "swish")  # that the MLPs may have
    MULTIPLIERS: ClassVar[tuple[str, ...]] = ()  # fields that must be positive

    vocab_size: int
    hidden_size: int
    layers: tuple[str, ...]  # kind of each layer's mixer
    head_dim: int
    mamba_d_head: int
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    intermediate_size: int = 14336
    mamba_n_heads: int = 128
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = False
    eos_token_id: tuple[int, ...] = (2,)
    rotary: RotaryConfig | None = None

    @classmethod
    def read(cls, config: dict[str, Any], layers: list[str], mamba_width: int | None = None, **derived: Any) -> Self:
        """The published fields and those that the family derives from them. Raises CheckpointError, see `from_json`.

        mamba_width: channels of x; by default `mamba_expand` times the hidden size.
        """
        check_values(config, {"hidden_act": cls.ACTIVATIONS})
        limit = [_number(value) for value in config.get("time_step_limit") or (0.0, math.inf)]
        if limit != [0.0, math.inf]:
            raise CheckpointError(f"config.json: time_step_limit = {limit}; served: [0.0, inf]")
        given = published_fields(cls, config)
        try:
            heads = config.get("num_attention_heads", cls.num_attention_heads)
            given["num_key_value_heads"] = config.get("num_key_value_heads", cls.num_key_value_heads) or heads
            given["head_dim"] = config.get("head_dim") or given["hidden_size"] // heads
            width = mamba_width or config.get("mamba_expand", 2) * given["hidden_size"]
            if config.get("mamba_d_head", "auto") in ("auto", None):
                given["mamba_d_head"] = width // config.get("mamba_n_heads", cls.mamba_n_heads)
            parsed = cls(**{**given, **derived, "layers": tuple(layers)})
        except KeyError as error:
            raise CheckpointError(f"config.json lacks {error.args[0]}") from error
        except TypeError as error:
            raise CheckpointError(f"config.json: {error}") from error
        if parsed.mamba_width != width:
            raise CheckpointError(
                f"config.json: mamba_n_heads {parsed.mamba_n_heads} x mamba_d_head {parsed.mamba_d_head} is not {width}"
            )
        for missing, other in ((MAMBA, ATTENTION), (ATTENTION, MAMBA)):
            if all(kind == other for kind in parsed.layers):
                raise CheckpointError(
                    f"config.json: no layer of {missing} among {len(layers)}; hybrid models are served"
                )
        for name in cls.MULTIPLIERS:
            value = getattr(parsed, name)
            if not all(each > 0 for each in (value if isinstance(value, tuple) else (value,))):
                raise CheckpointError(f"config.json: {name} = {value}; served: positive ones")
        return parsed

    # Under the names by which layers ask

    @property
    def conv_width(self) -> int:
        return self.mamba_d_conv

    @property
    def conv_kernel(self) -> int:
        return self.mamba_d_conv

    @property
    def mamba_num_heads(self) -> int:
        return self.mamba_n_heads

    @property
    def mamba_head_dim(self) -> int:
        return self.mamba_d_head

    @property
    def mamba_width(self) -> int:
        return self.mamba_n_heads * self.mamba_d_head

    @property
    def n_groups(self) -> int:
        return self.mamba_n_groups

    @property
    def ssm_state_size(self) -> int:
        return self.mamba_d_state

    @property
    def conv_dim(self) -> int:
        """Channels of the conv: x, B and C."""
        return self.mamba_width + 2 * self.mamba_n_groups * self.mamba_d_state

    @property
    def use_conv_bias(self) -> bool:
        return self.mamba_conv_bias

    @property
    def use_bias(self) -> bool:
        return self.mamba_proj_bias

    @property
    def layer_norm_epsilon(self) -> float:
        return self.rms_norm_eps

    @property
    def time_step_min(self) -> float:
        return 0.0

    # What the engine asks

    def attention_specs(self, dtype: torch.dtype, with_drafter: bool) -> list[AttentionSpec]:
        """KV shape of each layer with attention."""
        count = sum(kind != MAMBA for kind in self.layers)
        return [AttentionSpec(f"attention.{i}", self.num_key_value_heads, self.head_dim, dtype) for i in range(count)]

    def state_specs(self, dtype: torch.dtype, temporal_dtype: torch.dtype, with_drafter: bool) -> list[StateSpec]:
        """Conv and temporal state of each layer with Mamba."""
        specs = []
        for i in range(sum(kind != ATTENTION for kind in self.layers)):
            specs.append(StateSpec(f"conv.{i}", "conv", (self.conv_dim,), dtype))
            shape = (self.mamba_n_heads, self.mamba_d_head, self.mamba_d_state)
            specs.append(StateSpec(f"temporal.{i}", "temporal", shape, temporal_dtype))
        return specs


class Mamba2Decoder(HybridModel):
    """Layers of a mixer and an MLP, each behind its norm, over a residual stream divided by `stream_divisor`.

    A subclass names its norms, and builds mixers and MLPs in `mixer` and `mlp`.
    """

    chunk_tokens = MAMBA2_CHUNK
    norm_names: tuple[str, str]  # of a layer: before the mixer, before the MLP
    final_norm_name: str

    def __init__(
        self,
        config: Mamba2DecoderConfig,
        weights: Weights,
        embedding_multiplier: float = 1.0,
        stream_divisor: float = 1.0,
        logits_multiplier: float = 1.0,
    ):
        super().__init__(config, weights)
        if embedding_multiplier != stream_divisor:
            self.embedding = self.embedding * (embedding_multiplier / stream_divisor)
        eps, hidden = config.rms_norm_eps / stream_divisor**2, config.hidden_size
        self.blocks = []
        for i, kind in enumerate(config.layers):
            name = f"model.layers.{i}"
            earlier = config.layers[:i]
            kv_index, state_index = (sum(k != other for k in earlier) for other in (MAMBA, ATTENTION))
            parts = self.mixer(weights, name, kind, kv_index, state_index), self.mlp(weights, name)
            for norm_name, part in zip(self.norm_names, parts, strict=True):
                self.blocks.append(ResidualBlock(RMSNorm(weights, f"{name}.{norm_name}", hidden, eps), part))
        self.final_norm = RMSNorm(weights, self.final_norm_name, hidden, eps)
        if logits_multiplier != 1.0:
            self.final_norm.weight = self.final_norm.weight * logits_multiplier

    def mixer(self, weights: Weights, name: str, kind: str, kv_index: int, state_index: int):
        """The mixer of the layer `name`; its keys and states are the cache's `kv_index`th and `state_index`th."""
        raise NotImplementedError

    def mlp(self, weights: Weights, name: str):
        """The MLP of the layer `name`."""
        raise NotImplementedError

    def feed_forward(self, weights: Weights, name: str, gate_scale: float = 1.0, scale: float = 1.0) -> GatedMLP:
        """The gated MLP that Bamba and Falcon-H1 have after each mixer."""
        config, name = self.config, f"{name}.feed_forward"
        return GatedMLP(
            weights,
            [f"{name}.gate_proj", f"{name}.up_proj"],
            f"{name}.down_proj",
            config.hidden_size,
            config.intermediate_size,
            config.mlp_bias,
            gate_scale,
            scale,
        )

    def run(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return run_blocks(self.blocks, self.final_norm, x, context)


def _number(value: Any) -> float:
    """A number of a config.json, where infinity may be written as {"__float__": "Infinity"}."""
    try:
        return float(value["__float__"] if isinstance(value, dict) else value)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {value!r} is no number") from error
