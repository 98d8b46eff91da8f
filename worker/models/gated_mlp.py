"""The gated MLP: down(silu(gate(x)) * up(x)), gate and up as one product."""

import torch

from mambalign.kernels.silu_mul import silu_mul
from mambalign.worker.models.layers import ForwardContext, Linear
from mambalign.worker.models.loader import Weights


class GatedMLP:
    """down(silu(gate(x) * gate_scale) * up(x) * scale).

    gate_up: names of the two layers, or of the one in which they are published side by side, gate first.
    """

    def __init__(
        self,
        weights: Weights,
        gate_up: list[str] | str,
        down: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        gate_scale: float = 1.0,
        scale: float = 1.0,
    ):
        widths = 2 * intermediate_size if isinstance(gate_up, str) else [intermediate_size] * 2
        self.gate_up_proj = Linear(weights, gate_up, hidden_size, widths, bias)
        self.down_proj = self.last = Linear(weights, down, intermediate_size, hidden_size, bias)
        self.gate_scale, self.scale = gate_scale, scale

    def linears(self) -> list[Linear]:
        return [self.gate_up_proj, self.down_proj]

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(silu_mul(gate, up, self.gate_scale, self.scale))
