"""The mixture-of-experts layer in every form: values beside a plain loop, bits whatever tokens run together."""

import pytest
import torch
import torch.nn.functional as F

from mambalign.kernels.expert_routing import Routing
from mambalign.kernels.linear import check_linear_invariance
from mambalign.kernels.tolerances import tolerance
from mambalign.worker.models.gated_mlp import GatedMLP
from mambalign.worker.models.layers import Linear
from mambalign.worker.models.loader import DummyWeights
from mambalign.worker.models.moe import Experts, MoE, Router, exact_addends, stack_experts, take_stacked_experts

HIDDEN, INNER, SHARED_INNER, LATENT = 40, 21, 19, 24
ROUTINGS = {
    "softmax": Routing(37, 5, sigmoid=False, normalised=True),
    "softmax over all": Routing(37, 5, sigmoid=False, normalised=False),
    "sigmoid": Routing(37, 8, sigmoid=True, normalised=True, scale=2.5),
    "groups": Routing(36, 6, sigmoid=True, normalised=True, scale=1.5, num_groups=6, top_groups=3),
}


class RecordedWeights(DummyWeights):
    """Random weights, each kept under its name."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(dtype, "cpu")
        self.taken: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        self.taken[name] = super().take(name, shape, dtype)
        return self.taken[name]


def layer(routing: Routing, gated: bool, shared: str, latent: bool, dtype: torch.dtype) -> tuple[MoE, dict]:
    weights, count, width = RecordedWeights(dtype), routing.num_experts, LATENT if latent else HIDDEN
    bias_name = "bias" if routing.sigmoid else None
    router = Router(weights, "router", HIDDEN, routing, bias_name)
    parts = ["gate_proj", "up_proj"] if gated else ["up_proj"]
    up = stack_experts(weights, "experts", parts, count, INNER, width)
    down = take_stacked_experts(weights, "experts.down_proj", count, width, INNER)
    mixture = MoE(
        router,
        Experts(up, down, None if gated else "relu2", gated),
        GatedMLP(weights, ["shared.gate", "shared.up"], "shared.down", HIDDEN, SHARED_INNER) if shared else None,
        Linear(weights, "shared_gate", HIDDEN, 1) if shared == "gated" else None,
        (Linear(weights, "fc1", HIDDEN, LATENT), Linear(weights, "fc2", LATENT, HIDDEN)) if latent else None,
    )
    check_linear_invariance([each.weight for each in mixture.linears()])
    return mixture, {name: tensor.double() for name, tensor in weights.taken.items()}


def plain(x: torch.Tensor, w: dict, routing: Routing, ids: list[list[int]], gated: bool, shared: str, latent: bool):
    """Token by token, expert by expert, in fp64. ids: the experts that the layer chose."""
    logits = x @ w["router"].t()
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(1)
    out = []
    for row, score, chosen in zip(x, scores, ids, strict=True):
        inner = w["fc1.weight"] @ row if latent else row
        total = score[chosen].sum() if routing.normalised else 1.0
        y = torch.zeros_like(inner)
        for e in chosen:
            up = w[f"experts.{e}.up_proj.weight"] @ inner
            up = F.silu(w[f"experts.{e}.gate_proj.weight"] @ inner) * up if gated else up.relu() ** 2
            y += score[e] / total * routing.scale * (w["experts.down_proj"][e] @ up)
        y = w["fc2.weight"] @ y if latent else y
        if shared:
            extra = w["shared.down.weight"] @ (F.silu(w["shared.gate.weight"] @ row) * (w["shared.up.weight"] @ row))
            y += extra * (w["shared_gate.weight"] @ row).sigmoid() if shared == "gated" else extra
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("shared", ["", "plain", "gated"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_values_and_bits(name: str, gated: bool, shared: str, latent: bool, dtype: torch.dtype) -> None:
    routing = ROUTINGS[name]
    mixture, weights = layer(routing, gated, shared, latent, dtype)
    x = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = mixture(x, None)
    assert whole.dtype == dtype
    want = plain(x.double(), weights, routing, mixture.router(x)[0].tolist(), gated, shared, latent)
    scale = want.abs().max()
    torch.testing.assert_close(whole.double() / scale, want / scale, **tolerance("kernel", dtype))
    for first, count in ((0, 1), (1, 2), (5, 3), (7, 17), (3, 64), (69, 1)):
        assert torch.equal(mixture(x[first : first + count], None), whole[first : first + count])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mixture(x[order], None), whole[order])


def test_no_tokens() -> None:
    mixture, _ = layer(ROUTINGS["sigmoid"], True, "gated", False, torch.float32)
    assert mixture(torch.empty(0, HIDDEN), None).shape == (0, HIDDEN)


@pytest.mark.parametrize(("stored", "count"), [(torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 3)])
def test_a_routers_weight_is_the_exact_sum_of_its_addends(stored: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=generator).ldexp_(torch.randint(-9, 10, (64, 32), generator=generator))
    weight = weight.to(stored).float()
    addends = exact_addends(weight, torch.bfloat16)
    assert [each.dtype for each in addends] == [torch.bfloat16] * count
    assert torch.equal(sum(each.double() for each in addends), weight.double())
    assert len(exact_addends(weight, torch.float32)) == 1


def test_a_weight_that_is_no_number_ends_as_such() -> None:
    addends = exact_addends(torch.tensor([[float("nan"), 1.0]]), torch.bfloat16)
    assert sum(addends).isnan().tolist() == [[True, False]]
