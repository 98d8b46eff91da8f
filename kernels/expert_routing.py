"""Mixture of experts: which experts a token goes to, and the tokens of each expert side by side.

A token's experts and weights depend on its own logits only; ties go to the lowest id. Nothing is read back to the
host: an expert's number of tokens is known on the device alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

SORT_BLOCKS = ((4096, 1024, 4), (2**31, 4096, 8))  # most pairs; ids that a program reads at a time, and its warps
NO_ID: tl.constexpr = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Routing:
    """How a family chooses experts. A token takes the `top_k` best of its `top_groups` best groups of experts; a
    group counts as much as its two best."""

    num_experts: int
    top_k: int
    sigmoid: bool  # scores are sigmoids, each by itself (and a bias may help to choose); else a softmax
    normalised: bool  # the chosen weights add up to one before they are scaled
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    tiny: float = 1e-20  # beside the sum that normalised weights are divided by, as published

    def __post_init__(self):
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.top_k} experts a token of {self.num_experts}")
        if self.num_groups > 1:
            group = self.num_experts // self.num_groups
            if self.num_experts % self.num_groups or group < 2 or not 1 <= self.top_groups <= self.num_groups:
                raise ValueError(f"{self.top_groups} of {self.num_groups} groups of {self.num_experts} experts")
            if self.top_groups * group < self.top_k:
                raise ValueError(f"{self.top_k} experts a token of {self.top_groups} groups of {group}")


@triton.jit
def route_experts_kernel(
    p_logits,
    p_bias,
    p_ids,
    p_weights,
    scale,
    tiny,
    E: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    """ids, weights[t] = the TOP_K experts of token t with the largest score (+ bias), and their scores times scale.

    Grid: tokens; a program owns one. Reads its logits, as NUM_PARTS addends, and the bias; writes TOP_K ids and
    weights, best first. fp32; chosen scores are added best first. An id is always one of E, also for logits that are
    not numbers.
    """
    wait_for_inputs(PDL)
    i_t, o_e, o_k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    b_logit = tl.load(p_logits + i_t * (NUM_PARTS * E) + o_e, mask=o_e < E, other=float("-inf"))
    for i in tl.static_range(1, NUM_PARTS):
        b_logit += tl.load(p_logits + i_t * (NUM_PARTS * E) + i * E + o_e, mask=o_e < E, other=0.0)
    if SIGMOID:
        b_score = 1.0 / (1.0 + tl.exp(-b_logit))
        b_choice = b_score
        if HAS_BIAS:
            b_choice += tl.load(p_bias + o_e, mask=o_e < E, other=0.0)
    else:
        b_score = tl.exp(b_logit - tl.max(b_logit, axis=0))
        b_choice = b_logit
    b_choice = tl.where((o_e < E) & (b_choice == b_choice), b_choice, float("-inf"))
    if NUM_GROUPS > 1:
        b_group, o_g = o_e // (E // NUM_GROUPS), tl.arange(0, BLOCK_G)
        b_best = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        for i in range(NUM_GROUPS):
            b_in = tl.where(b_group == i, b_choice, float("-inf"))
            first = tl.max(b_in, axis=0)
            i_first = tl.min(tl.where(b_in == first, o_e, NO_ID), axis=0)
            second = tl.max(tl.where(o_e == i_first, float("-inf"), b_in), axis=0)
            b_best = tl.where(o_g == i, first + second, b_best)
        b_kept = tl.zeros((BLOCK_E,), tl.int32)
        for _ in range(TOP_GROUPS):
            i_best = tl.min(tl.where(b_best == tl.max(b_best, axis=0), o_g, NO_ID), axis=0)
            b_kept = tl.where(b_group == i_best, 1, b_kept)
            b_best = tl.where(o_g == i_best, float("-inf"), b_best)
        b_choice = tl.where(b_kept == 1, b_choice, float("-inf"))
    b_id, b_weight, total = tl.zeros((BLOCK_K,), tl.int32), tl.zeros((BLOCK_K,), tl.float32), 0.0
    for i in range(TOP_K):
        i_best = tl.min(tl.where(b_choice == tl.max(b_choice, axis=0), o_e, NO_ID), axis=0)
        value = tl.sum(tl.where(o_e == i_best, b_score, 0.0), axis=0)
        total += value
        b_id, b_weight = tl.where(o_k == i, i_best, b_id), tl.where(o_k == i, value, b_weight)
        b_choice = tl.where(o_e == i_best, float("-inf"), b_choice)
    if NORMALISED:
        b_weight = b_weight / (total + tiny)
    elif not SIGMOID:
        b_weight = b_weight / tl.sum(b_score, axis=0)
    tl.store(p_ids + i_t * TOP_K + o_k, b_id, mask=o_k < TOP_K)
    tl.store(p_weights + i_t * TOP_K + o_k, b_weight * scale, mask=o_k < TOP_K)


@triton.jit(do_not_specialize=["num_pairs"])
def sort_by_expert_kernel(p_ids, p_order, p_first, num_pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """order = places of ids, by id and then by place; first[e] = number of ids below e.

    Grid: experts, and one more; a program owns the places of one expert. Reads all ids twice: to count those of
    experts below, then to place its own. Whole numbers only.
    """
    wait_for_inputs(PDL)
    i_e, o_pair = tl.program_id(0), tl.arange(0, BLOCK)
    b_below = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_pairs, BLOCK):
        b_id = tl.load(p_ids + first + o_pair, mask=first + o_pair < num_pairs, other=NO_ID)
        b_below += (b_id < i_e).to(tl.int32)
    place = tl.sum(b_below, axis=0)
    tl.store(p_first + i_e, place)
    if i_e < tl.num_programs(0) - 1:
        for first in range(0, num_pairs, BLOCK):
            b_id = tl.load(p_ids + first + o_pair, mask=first + o_pair < num_pairs, other=NO_ID)
            b_mine = (b_id == i_e).to(tl.int32)
            tl.store(p_order + place + tl.cumsum(b_mine, axis=0) - 1, first + o_pair, mask=b_mine == 1)
            place += tl.sum(b_mine, axis=0)


def route_experts_reference(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of each token.

    logits [T, E] fp32, or [T, n * E], n addends side by side; bias [E] fp32, added to sigmoid scores for the choice
    alone. Returns ids int32 [T, top_k], best first, and weights fp32 [T, top_k].
    """
    num_tokens = logits.shape[0]
    first, *others = logits.split(routing.num_experts, dim=1)
    logits = sum(others, start=first)
    if routing.sigmoid:
        scores = torch.div(1.0, logits.neg().exp_().add_(1.0))
        choice = scores if bias is None else scores + bias
    else:
        scores, choice = torch.exp(logits - logits.max(dim=1, keepdim=True).values), logits
    if routing.num_groups > 1:
        groups = choice.view(num_tokens, routing.num_groups, -1)
        best = groups.sort(dim=2, descending=True).values
        best = (best[:, :, 0] + best[:, :, 1]).sort(dim=1, descending=True, stable=True).indices
        dropped = best[:, routing.top_groups :, None].expand(-1, -1, groups.shape[2])
        choice = groups.scatter(1, dropped, float("-inf")).view(num_tokens, -1)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.normalised:
        total = weights[:, :1].clone()
        for i in range(1, routing.top_k):
            total += weights[:, i : i + 1]
        weights = weights.div_(total.add_(routing.tiny))
    elif not routing.sigmoid:
        weights = weights.div_(_sum_by_halves(scores))
    return ids.int(), weights.mul_(routing.scale)


def sort_by_expert_reference(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of ids int32 [T, k] by expert, and where each expert's begin.

    Returns order int32 [T * k] (place t * k + i stands for the i-th choice of token t) and first int32
    [num_experts + 1]: expert e has order[first[e] : first[e + 1]], in ascending order.
    """
    flat = ids.flatten()
    first = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    first[1:] = flat.bincount(minlength=num_experts).cumsum(0)
    return flat.argsort(stable=True).int(), first


def route_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route_experts_reference`, on a GPU in one launch. logits: contiguous."""
    if not logits.is_cuda:
        return route_experts_reference(logits, bias, routing)
    return route_experts_on_gpu(logits, bias, routing)


def sort_by_expert(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`sort_by_expert_reference`, on a GPU in one launch without synchronisation. ids: contiguous."""
    if not ids.is_cuda:
        return sort_by_expert_reference(ids, num_experts)
    return sort_by_expert_on_gpu(ids, num_experts)


def route_experts_on_gpu(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel behind `route_experts`. Raises ValueError for logits that are not fp32 [T, n * E] and contiguous."""
    num_tokens, num_experts = logits.shape[0], routing.num_experts
    num_parts, left = divmod(logits.shape[1], num_experts)
    if logits.dtype != torch.float32 or not logits.is_contiguous() or left or not num_parts:
        raise ValueError(f"route_experts takes contiguous fp32 [T, n * {num_experts}], got {logits.shape}")
    ids = torch.empty(num_tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = logits.new_empty(num_tokens, routing.top_k)
    if num_tokens:
        route_experts_kernel[(num_tokens,)](
            logits, logits if bias is None else bias, ids, weights, float(routing.scale), routing.tiny,
            E=num_experts, NUM_PARTS=num_parts, TOP_K=routing.top_k, NUM_GROUPS=routing.num_groups,
            TOP_GROUPS=routing.top_groups, SIGMOID=routing.sigmoid, NORMALISED=routing.normalised,
            HAS_BIAS=bias is not None, BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(routing.top_k), BLOCK_G=triton.next_power_of_2(routing.num_groups),
            num_warps=1, **pdl(logits.device),
        )  # fmt: skip
    return ids, weights


def sort_by_expert_on_gpu(
    ids: torch.Tensor, num_experts: int, block: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel behind `sort_by_expert`."""
    own_block, num_warps = next(rest for most, *rest in SORT_BLOCKS if ids.numel() <= most)
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    first = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    sort_by_expert_kernel[(num_experts + 1,)](
        ids, order, first, ids.numel(), block or own_block, num_warps=num_warps, **pdl(ids.device)
    )
    return order, first


def _sum_by_halves(x: torch.Tensor) -> torch.Tensor:
    """Sums of the rows of x [T, E], in one order whatever T is. Returns [T, 1]."""
    width = triton.next_power_of_2(x.shape[1])
    total = torch.nn.functional.pad(x, (0, width - x.shape[1]))
    while width > 1:
        width //= 2
        total = total[:, :width] + total[:, width:]
    return total
