"""Rotary positions of a model: what config.json says of them, their frequencies, and the table that all layers share.

Scalings follow transformers' `modeling_rope_utils`: none ("default"), "linear", "llama3" and "yarn" (arXiv
2309.00071). Those that change with the length of the text would change tokens that are already cached: refused.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from mambalign.kernels.rotary import rotary_table
from mambalign.worker.models.loader import CheckpointError

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class RotaryConfig:
    """What shapes the rotation: base, rotated channels of a head, positions, and the scaling's own fields."""

    theta: float
    rotary_dim: int
    num_positions: int
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0  # "yarn" and "llama3": the length that the model was first trained for
    attention_factor: float | None = None  # "yarn": of cosines and sines
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0  # "llama3"
    high_freq_factor: float = 4.0

    @classmethod
    def from_json(
        cls, config: dict[str, Any], head_dim: int, num_positions: int, partial_rotary_factor: float = 1.0
    ) -> "RotaryConfig":
        """Read `rope_parameters`, or the older `rope_theta`, `rope_scaling` and `partial_rotary_factor`.

        partial_rotary_factor: the family's, where config.json has none. Raises CheckpointError for a kind of scaling
        that is not served, or one that lacks a field.
        """
        old = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
        given: dict[str, Any] = {}
        for part in (old, config.get("rope_scaling"), config.get("rope_parameters")):
            part = part or {}
            if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
                raise CheckpointError(f"config.json: rotary positions by {part}; served: the same for all layers")
            given |= {name: value for name, value in part.items() if value is not None}
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _FREQUENCIES:
            raise CheckpointError(f"config.json: rope_type = {kind!r}; served: {', '.join(_FREQUENCIES)}")
        needed = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor",),
        }
        for name in needed.get(kind, ()):
            if name not in given:
                raise CheckpointError(f"config.json: rope_type = {kind!r} without {name}")
        for name in ("rope_theta", "factor", "original_max_position_embeddings"):
            if name in given and not (type(given[name]) in (int, float) and given[name] > 0):
                raise CheckpointError(f"config.json: {name} = {given[name]!r}; served: positive numbers")
        own = ("factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate")
        own += ("low_freq_factor", "high_freq_factor")
        return cls(
            theta=given.get("rope_theta", DEFAULT_THETA),
            rotary_dim=int(head_dim * given.get("partial_rotary_factor", partial_rotary_factor)),
            num_positions=num_positions,
            kind=kind,
            original_positions=given.get("original_max_position_embeddings", num_positions),
            **{name: given[name] for name in own if name in given},
        )


class Rotary:
    """The table by which queries and keys are turned (`place_heads`). One object serves all layers."""

    def __init__(self, config: RotaryConfig, device: torch.device | str):
        if config.rotary_dim < 2 or config.rotary_dim % 2:
            raise CheckpointError(f"config.json: rotary positions over {config.rotary_dim} channels of a head")
        inv_freq, scale = frequencies(config)
        self.table = rotary_table(inv_freq.to(device), scale, config.num_positions)


def frequencies(config: RotaryConfig) -> tuple[torch.Tensor, float]:
    """Radians a position, fp32 [rotary_dim / 2] on the CPU, and the factor of cosines and sines."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    return _FREQUENCIES[config.kind](config, config.theta**exponents)


def _default(config: RotaryConfig, wave: torch.Tensor) -> tuple[torch.Tensor, float]:
    return 1.0 / wave, 1.0


def _linear(config: RotaryConfig, wave: torch.Tensor) -> tuple[torch.Tensor, float]:
    return 1.0 / wave / config.factor, 1.0


def _llama3(config: RotaryConfig, wave: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Fast turns stay, slow ones are slowed by `factor`, those between in proportion."""
    inv_freq, low, high = 1.0 / wave, config.low_freq_factor, config.high_freq_factor
    turns = config.original_positions / (2 * math.pi / inv_freq)  # within the trained length
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * inv_freq / config.factor + kept * inv_freq, 1.0


def _yarn(config: RotaryConfig, wave: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Channels that turn often within the trained length stay, those that turn seldom are slowed, a ramp between."""

    def channel_of(turns: float) -> float:
        turned = config.original_positions / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(turned) / (2 * math.log(config.theta))

    def magnitude(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    low, high = channel_of(config.beta_fast), channel_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    ramp = torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low
    kept = 1 - (ramp / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    inv_freq = 1.0 / (config.factor * wave) * (1 - kept) + 1.0 / wave * kept
    if config.attention_factor is not None:
        return inv_freq, config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return inv_freq, magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return inv_freq, magnitude(1.0)


_FREQUENCIES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
