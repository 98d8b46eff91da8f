"""Mixture of experts: routing, the grouped product and the sum of results, beside plain forms and across batches."""

import pytest
import torch

from mambalign.kernels import grouped_linear
from mambalign.kernels.activation import relu2, silu
from mambalign.kernels.combine_experts import combine_experts_on_gpu, combine_experts_reference
from mambalign.kernels.expert_routing import (
    Routing,
    route_experts_on_gpu,
    route_experts_reference,
    sort_by_expert_on_gpu,
    sort_by_expert_reference,
)
from mambalign.kernels.grouped_linear import (
    Tiles,
    grouped_linear_on_gpu,
    grouped_linear_reference,
    tiles_for,
)
from mambalign.kernels.tolerances import tolerance

HALF = (
    torch.bfloat16 if torch.cuda.is_available() else torch.float16
)  # the interpreter's dot reads bfloat16 as integers
ROUTINGS = {
    "sigmoid": Routing(7, 3, sigmoid=True, normalised=True, scale=2.5, tiny=0.25),
    "groups": Routing(24, 4, sigmoid=True, normalised=False, scale=1.5, num_groups=4, top_groups=2),
    "two of three groups": Routing(33, 6, sigmoid=True, normalised=True, num_groups=3, top_groups=2),
    "softmax": Routing(10, 4, sigmoid=False, normalised=True),
    "softmax over all": Routing(19, 2, sigmoid=False, normalised=False),
    "all": Routing(5, 5, sigmoid=False, normalised=True),
    "one": Routing(4, 1, sigmoid=True, normalised=False),
}
TILES = [Tiles(16, 16, 32, 4, 2), Tiles(16, 32, 16, 4, 2), Tiles(32, 64, 32, 4, 2)]


def plain_route(logits: list[float], bias: list[float], routing: Routing) -> tuple[list[int], list[float]]:
    """One token, one number after another."""
    x = torch.tensor(logits, dtype=torch.float64)
    scores = (x.sigmoid() if routing.sigmoid else x.softmax(0)).tolist()
    choice = [score + b for score, b in zip(scores, bias, strict=True)]
    size = routing.num_experts // routing.num_groups
    groups = [sorted(choice[i : i + size])[-2:] for i in range(0, routing.num_experts, size)]
    best_groups = sorted(range(routing.num_groups), key=lambda g: (-sum(groups[g]), g))[: routing.top_groups]
    allowed = [e for e in range(routing.num_experts) if routing.num_groups == 1 or e // size in best_groups]
    ids = sorted(allowed, key=lambda e: (-choice[e], e))[: routing.top_k]
    total = sum(scores[e] for e in ids) + routing.tiny if routing.normalised else 1.0
    return ids, [scores[e] / total * routing.scale for e in ids]


def random_logits(routing: Routing, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """With equal ones among them, and a bias for sigmoids."""
    generator = torch.Generator().manual_seed(routing.num_experts)
    logits = torch.randn(num_tokens, routing.num_experts, generator=generator)
    logits[1::3] = logits[1::3].round()
    logits[2] = 0.0
    bias = torch.randn(routing.num_experts, generator=generator) if routing.sigmoid else None
    return logits, bias


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_is_the_plain_one(name: str, device: str) -> None:
    routing = ROUTINGS[name]
    logits, bias = random_logits(routing, 12)
    bias_list = [0.0] * routing.num_experts if bias is None else bias.tolist()
    plain = [plain_route(row, bias_list, routing) for row in logits.tolist()]
    on_device = [None if t is None else t.to(device) for t in (logits, bias)]
    for function in (route_experts_reference, route_experts_on_gpu):
        ids, weights = function(*on_device, routing)
        assert ids.dtype == torch.int32
        assert ids.tolist() == [ids for ids, _ in plain]
        want = torch.tensor([weights for _, weights in plain])
        torch.testing.assert_close(weights.cpu(), want, **tolerance("kernel", torch.float32))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("num_parts", [2, 3])
def test_logits_may_come_as_addends(name: str, num_parts: int, device: str) -> None:
    routing = ROUTINGS[name]
    logits, bias = (None if t is None else t.to(device) for t in random_logits(routing, 12))
    parts = [logits.bfloat16().float()]
    for i in range(1, num_parts):
        parts.append((logits - sum(parts)).bfloat16().float() if i < num_parts - 1 else logits - sum(parts))
    want = route_experts_reference(logits, bias, routing)
    for function in (route_experts_reference, route_experts_on_gpu):
        ids, weights = function(torch.cat(parts, dim=1), bias, routing)
        assert torch.equal(ids, want[0])
        torch.testing.assert_close(weights, want[1], **tolerance("kernel", torch.float32))


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_tokens_experts_do_not_depend_on_the_others(name: str, device: str) -> None:
    routing = ROUTINGS[name]
    logits, bias = (None if t is None else t.to(device) for t in random_logits(routing, 40))
    for function in (route_experts_reference, route_experts_on_gpu):
        whole = function(logits, bias, routing)
        for first, count in ((0, 1), (3, 1), (7, 5), (39, 1)):
            part = function(logits[first : first + count].contiguous(), bias, routing)
            assert all(torch.equal(a, b[first : first + count]) for a, b in zip(part, whole, strict=True))


def test_ties_go_to_the_lowest_id(device: str) -> None:
    logits = torch.zeros(2, 8, device=device)
    for routing in (Routing(8, 3, True, True), Routing(8, 3, False, True), Routing(8, 3, True, True, 1.0, 4, 2)):
        for function in (route_experts_reference, route_experts_on_gpu):
            assert function(logits, None, routing)[0].tolist() == [[0, 1, 2]] * 2


def test_what_is_no_number_stays_within_the_experts(device: str) -> None:
    """Padding may hold anything; an id out of range would be an address out of range."""
    logits = torch.full((4, 6), float("nan"), device=device)
    logits[1], logits[2], logits[3, :5] = float("inf"), -float("inf"), 0.0
    for routing in (Routing(6, 3, True, True), Routing(6, 3, False, True), Routing(6, 2, True, True, 1.0, 3, 1)):
        ids, _ = route_experts_on_gpu(logits, None, routing)
        assert ids.min() >= 0 and ids.max() < 6


def test_numbers_that_do_not_fit_together_are_refused() -> None:
    for arguments in ((4, 5, True, True), (6, 2, True, True, 1.0, 4, 2), (8, 5, True, True, 1.0, 4, 2)):
        with pytest.raises(ValueError):
            Routing(*arguments)


@pytest.mark.parametrize("block", [16, None])
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(1, 1, 1), (5, 3, 7), (37, 4, 9), (3, 2, 40)])
def test_sorting_by_expert(num_tokens: int, top_k: int, num_experts: int, block: int | None, device: str) -> None:
    check_sorting(num_tokens, top_k, num_experts, block, device)


def test_sorting_a_long_prompt(device: str) -> None:
    check_sorting(1400, 3, 5, None, device)


def check_sorting(num_tokens: int, top_k: int, num_experts: int, block: int | None, device: str) -> None:
    ids = torch.randint(num_experts, (num_tokens, top_k), generator=torch.Generator().manual_seed(1)).int()
    flat = ids.flatten().tolist()
    want = sorted(range(len(flat)), key=lambda place: (flat[place], place))
    begins = [sum(e < expert for e in flat) for expert in range(num_experts + 1)]
    for order, first in (
        sort_by_expert_reference(ids, num_experts),
        sort_by_expert_on_gpu(ids.to(device), num_experts, block),
    ):
        assert order.tolist() == want and first.tolist() == begins


def mixture(num_tokens: int, k: int, n: int, gated: bool, dtype: torch.dtype, seed: int = 0) -> tuple:
    """x, a weight of five experts, of which one gets no token and one most, and two choices a token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, k, generator=generator).to(dtype)
    weight = (torch.randn(5, k, 2 * n if gated else n, generator=generator) / k**0.5).to(dtype)
    ids = torch.stack([torch.full((num_tokens,), 4), torch.randint(3, (num_tokens,), generator=generator)], dim=1)
    return x, weight, ids.int()


def plain_grouped(x, weight, ids, activation: str | None, gated: bool) -> torch.Tensor:
    """[T, k, n] fp64, a pair at a time."""
    x, weight = x.double(), weight.double()
    out = torch.stack(
        [torch.stack([row @ weight[e] for e in chosen]) for row, chosen in zip(x, ids.tolist(), strict=True)]
    )
    if gated:
        gate, up = out.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return {None: lambda y: y, "relu2": lambda y: y.relu() ** 2, "silu": torch.nn.functional.silu}[activation](out)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("k", "n", "activation", "gated"),
    [(37, 21, "relu2", False), (64, 32, None, False), (40, 19, None, True), (8, 5, "silu", False)],
)
def test_products_of_pairs(
    k: int, n: int, activation: str | None, gated: bool, dtype: torch.dtype, device: str
) -> None:
    x, weight, ids = mixture(19, k, n, gated, dtype)
    want = plain_grouped(x, weight, ids, activation, gated)
    order, first = sort_by_expert_reference(ids, 5)
    close = tolerance("kernel", torch.float32 if dtype == torch.float32 else torch.bfloat16)
    moved = [t.to(device) for t in (x, weight, order, first)]
    results = [grouped_linear_reference(x, weight, order, first, 2, True, activation, gated)]
    results += [grouped_linear_on_gpu(*moved, 2, True, activation, gated, tiles) for tiles in TILES]
    for result in results:
        by_pair = torch.empty_like(result)
        by_pair[order.long().to(result.device)] = result
        torch.testing.assert_close(by_pair.view(19, 2, n).cpu().double(), want, **close)
    back = results[0]  # through the second product, which leaves results by pair
    down = (torch.randn(5, n, 11, generator=torch.Generator().manual_seed(3)) / n**0.5).to(dtype)
    pairs = ids.flatten().long()
    by_pair = torch.empty_like(back)
    by_pair[order.long()] = back
    want = torch.einsum("pk,pkn->pn", by_pair.double(), down.double()[pairs])
    got = [grouped_linear_reference(back, down, order, first, 2, False)]
    got += [
        grouped_linear_on_gpu(back.to(device), down.to(device), *moved[2:], 2, False, tiles=tiles) for tiles in TILES
    ]
    for result in got:
        torch.testing.assert_close(result.cpu().double(), want, **close)


@pytest.mark.parametrize("gated", [False, True])
def test_a_tokens_results_do_not_depend_on_the_others_or_the_tile(gated: bool, device: str) -> None:
    """Values are exact in any order of addition that the interpreter may take, so that bits are comparable there."""
    x, weight, ids = mixture(50, 64, 24, gated, torch.float32)
    x, weight = (x * 8).round() / 8, (weight * 64).round() / 64
    x, weight, ids = x.to(device), weight.to(device), ids.to(device)

    def run(rows: slice, tiles: Tiles | None) -> torch.Tensor:
        order, first = sort_by_expert_on_gpu(ids[rows].contiguous(), 5)
        inner = grouped_linear_on_gpu(x[rows], weight, order, first, 2, True, "relu2", gated, tiles)
        down = weight[:, :24, :24].contiguous()
        return grouped_linear_on_gpu((inner * 8).round() / 8, down, order, first, 2, False, tiles=tiles)

    whole = run(slice(0, 50), TILES[0]).view(50, 2, -1)
    for tiles in (*TILES, None):
        for begin, end in ((0, 50), (0, 1), (17, 18), (20, 41), (49, 50)):
            assert torch.equal(run(slice(begin, end), tiles).view(end - begin, 2, -1), whole[begin:end]), tiles


@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
@pytest.mark.parametrize("top_k", [1, 5])
def test_results_are_added_in_the_order_of_the_choice(top_k: int, shared: str, device: str) -> None:
    generator = torch.Generator().manual_seed(top_k)
    y = torch.randn(9 * top_k, 70, generator=generator)
    weights = torch.rand(9, top_k, generator=generator)
    extra = None if shared == "none" else torch.randn(9, 70, generator=generator)
    gate = torch.randn(9, 1, generator=generator) if shared == "gated" else None
    want = (y.view(9, top_k, 70).double() * weights.double()[:, :, None]).sum(1)
    if extra is not None:
        want += extra.double() * (1.0 if gate is None else gate.double().sigmoid())
    for function, place in ((combine_experts_reference, "cpu"), (combine_experts_on_gpu, device)):
        got = function(*(None if t is None else t.to(place) for t in (y, weights, extra, gate)))
        torch.testing.assert_close(got.cpu(), want.float(), **tolerance("kernel", torch.float32))
        one = function(
            *(None if t is None else t.to(place) for t in (y[3 * top_k : 4 * top_k], weights[3:4])),
            *(None if t is None else t[3:4].contiguous().to(place) for t in (extra, gate)),
        )
        assert torch.equal(one, got[3:4])


def test_tiles_follow_the_rows_of_an_expert() -> None:
    for gated in (False, True):
        assert tiles_for(4, 512, 1024, 2688, torch.bfloat16, gated).block_m == 16
        assert tiles_for(8192 * 6, 128, 2688, 1856, torch.bfloat16, gated).block_m == 128
        assert tiles_for(1, 8, 64, 5, torch.float32, gated).block_n == 16


def test_activations_round_where_separate_steps_would(device: str) -> None:
    x, weight, ids = mixture(17, 32, 16, False, HALF)
    order, first = (t.to(device) for t in sort_by_expert_reference(ids, 5))
    x, weight = x.to(device), weight.to(device)
    plain = grouped_linear_on_gpu(x, weight, order, first, 2, True)
    assert torch.equal(grouped_linear_on_gpu(x, weight, order, first, 2, True, "relu2"), relu2(plain))
    gated = grouped_linear_on_gpu(x, weight, order, first, 2, True, gated=True)
    torch.testing.assert_close(gated, silu(plain[:, :8]) * plain[:, 8:], atol=1e-3, rtol=1e-3)


def test_the_start_up_check_sees_an_order_that_follows_the_batch(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Tiles that add in another order where few rows run: noticed, and not used again."""
    monkeypatch.setattr(grouped_linear, "MAX_ROWS_TRIED", 200)
    monkeypatch.setattr(grouped_linear, "_one_family", set())
    place, shape = torch.device(device), (32, 16, torch.float32)
    assert grouped_linear._is_invariant(*shape, False, place) and grouped_linear._is_invariant(*shape, True, place)
    honest = grouped_linear.grouped_linear_on_gpu

    def partial(x: torch.Tensor, weight: torch.Tensor, *rest, tiles: Tiles, **options) -> torch.Tensor:
        if tiles.block_m >= 64:
            return honest(x, weight, *rest, tiles=tiles, **options)
        half = x.shape[1] // 2
        parts = [(x[:, :half], weight[:, :half]), (x[:, half:], weight[:, half:])]
        return sum(honest(a.contiguous(), b.contiguous(), *rest, tiles=tiles, **options) for a, b in parts)

    monkeypatch.setattr(grouped_linear, "grouped_linear_on_gpu", partial)
    assert not grouped_linear._is_invariant(*shape, False, place)
    grouped_linear._one_family.add(shape)
    assert grouped_linear._is_invariant(*shape, False, place)
