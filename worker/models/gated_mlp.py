"""The gated MLP: down(act(gate(x)) * up(x)), gate and up as one product."""

import torch

from mambalign.kernels.gate_mul import gate_mul
from mambalign.worker.models.layers import ForwardContext, Linear
from mambalign.worker.models.loader import Weights


class GatedMLP:
    """down(act(gate(x) * gate_scale) * up(x) * scale).

    gate_up: names of the two layers, or of the one in which they are published side by side, gate first. activation:
    of the gate, see `gate_mul`.
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
        activation: str = "silu",
    ):
        widths = 2 * intermediate_size if isinstance(gate_up, str) else [intermediate_size] * 2
        self.gate_up_proj = Linear(weights, gate_up, hidden_size, widths, bias)
        self.down_proj = self.last = Linear(weights, down, intermediate_size, hidden_size, bias)
        self.gate_scale, self.scale, self.activation = gate_scale, scale, activation

    def linears(self) -> list[Linear]:
        return [self.gate_up_proj, self.down_proj]

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(gate_mul(gate, up, self.gate_scale, self.scale, self.activation))
