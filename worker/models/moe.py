"""Mixture of experts: a router, experts of which each token takes a few, and experts that all tokens share.

    y = sum over the chosen, best first, of weight * expert(x), + shared(x), which a gate may scale

An expert is down(relu2(up(x))), or down(silu(gate(x)) * up(x)). In a latent mixture (Nemotron 3 Super) the experts
work between a projection down and one up. A token's bits depend on that token only: no expert has a capacity, and a
token's results are added in the order of its own choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mambalign.kernels.combine_experts import combine_experts
from mambalign.kernels.expert_routing import Routing, route_experts, sort_by_expert
from mambalign.kernels.grouped_linear import check_grouped_linear, grouped_linear
from mambalign.kernels.linear import linear
from mambalign.worker.models.layers import ForwardContext, Linear
from mambalign.worker.models.loader import Weights

MOST_ADDENDS = 3  # of a router's weight


@dataclass(frozen=True)
class ExpertWeight:
    """One expert's weight [K, N], which the check of `kernels.linear` tries: it stands where a `Linear` does."""

    weight: torch.Tensor
    num_experts: int  # that have one of this shape
    top_k: int  # of them that a token takes


class Router:
    """Logits in fp32, then the experts of each token and their weights. `bias_name`: corrects the choice alone.

    The weight is fp32. A GPU's matrix units take no fp32: with a model of 16 bits they multiply addends of 16 bits that
    the weight is the exact sum of, and `route_experts` adds the products.
    """

    def __init__(self, weights: Weights, name: str, hidden_size: int, routing: Routing, bias_name: str | None = None):
        self.routing = routing
        shape = (routing.num_experts, hidden_size)
        self.weight = weights.take(name, shape, torch.float32).t().contiguous()
        if self.weight.is_cuda:
            self.weight = torch.cat(exact_addends(self.weight, weights.dtype), dim=1)
        self.bias = None
        if bias_name is not None:
            self.bias = weights.take(bias_name, (routing.num_experts,), torch.float32)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> ids int32 [T, k], weights fp32 [T, k], best first."""
        logits = linear(x.to(self.weight.dtype), self.weight, out_dtype=torch.float32)
        return route_experts(logits, self.bias, self.routing)


def exact_addends(weight: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """As few tensors of `dtype` as add up to an fp32 weight, the largest part first.

    Three of bfloat16 hold 24 bits; what they leave of numbers below 2^-110 is dropped.
    """
    addends, rest = [weight.to(dtype)], weight
    while len(addends) < MOST_ADDENDS and (rest := rest - addends[-1].float()).any():
        addends.append(rest.to(dtype))
    return addends


class Experts:
    """All experts of a layer: up [E, in, inner] (or gate beside up, [E, in, 2 inner]), down [E, inner, in], K-major."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, activation: str | None, gated: bool = False):
        self.up, self.down, self.activation, self.gated = up, down, activation, gated
        for weight, is_gated in ((up, gated), (down, False)):
            check_grouped_linear(weight, is_gated)

    def linears(self, top_k: int) -> list[ExpertWeight]:
        return [ExpertWeight(weight[0], len(weight), top_k) for weight in (self.up, self.down)]

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, in], ids int32 [T, k] -> [T * k, in], the results of each token's choices side by side."""
        top_k = ids.shape[1]
        order, first = sort_by_expert(ids, self.up.shape[0])
        inner = grouped_linear(x, self.up, order, first, top_k, True, self.activation, self.gated)
        return grouped_linear(inner, self.down, order, first, top_k, False)


class MoE:
    """One layer.

    shared: what every token takes, called as (x, context). shared_gate: a linear layer of one output, whose sigmoid
    scales it. latent: the projections around the experts.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: Callable[[torch.Tensor, ForwardContext], torch.Tensor] | None = None,
        shared_gate: Linear | None = None,
        latent: tuple[Linear, Linear] | None = None,
    ):
        self.router, self.experts = router, experts
        self.shared, self.shared_gate, self.latent = shared, shared_gate, latent

    def linears(self) -> list:
        layers = [self.router, *self.experts.linears(self.router.routing.top_k), *(self.latent or ())]
        layers += self.shared.linears() if self.shared is not None else []
        return layers + ([self.shared_gate] if self.shared_gate is not None else [])

    def __call__(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        ids, weights = self.router(x)
        shared = self.shared(x, context) if self.shared is not None else None
        gate = self.shared_gate(x) if self.shared_gate is not None else None
        if self.latent is None:
            return combine_experts(self.experts(x, ids), weights, shared, gate)
        down, up = self.latent
        y = up(combine_experts(self.experts(down(x), ids), weights))
        return y if shared is None else combine_experts(y, weights.new_ones(len(y), 1), shared, gate)


def stack_experts(
    weights: Weights, name: str, parts: Sequence[str], num_experts: int, out_features: int, in_features: int
) -> torch.Tensor:
    """Weights published one an expert, as `name`.{expert}.{part}.weight [out, in]. Returns [E, in, out * parts].

    The parts (such as gate and up) stand side by side. Each is copied to its place as it is read, so that no expert is
    held twice.
    """
    stacked = None
    for expert in range(num_experts):
        for i, part in enumerate(parts):
            weight = weights.take(f"{name}.{expert}.{part}.weight", (out_features, in_features))
            if stacked is None:
                stacked = weight.new_empty(num_experts, in_features, out_features * len(parts))
            stacked[expert, :, i * out_features : (i + 1) * out_features] = weight.t()
    return stacked


def take_stacked_experts(
    weights: Weights, name: str, num_experts: int, out_features: int, in_features: int
) -> torch.Tensor:
    """Weights published as one tensor `name` [E, out, in]. Returns [E, in, out], contiguous."""
    return weights.take(name, (num_experts, out_features, in_features)).transpose(1, 2).contiguous()
