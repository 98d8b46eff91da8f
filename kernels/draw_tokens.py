"""Draw one token a row from the softmax of its logits, after `min_p`, `top_k` and `top_p`, without asking the host.

Formula: with v = (logits - best) / temperature, those under the `min_p` floor masked, take the token with the largest
v + Gumbel noise among the kept ones (Maddison, Tarlow, Minka, "A* sampling", 2014, section 2). Kept, in the order of
(v descending, id ascending): the first `top_k`; of these, every token before which less than `top_p` of their mass
lies. Masses are integers, in units of 2**-44 of the best token's, so that no order of addition shows.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.noise import gumbel_noise, gumbel_of
from mambalign.kernels.sampling import NO_BEST

MAX_VOCAB = 2**19 - 1  # 2**19 weights of the best token still fit a signed 64-bit sum
MASKED = torch.finfo(torch.float32).min  # finite: a row that is masked everywhere still has a maximum
_FIRST_DEPTH = 256  # best tokens looked at for a top_p without top_k; 8 times more until they hold the mass
_CPU_CHUNK = 2**15  # logits worked on at once: temporaries stay in the cache, and one core does not wait for two
BLOCK = 1024  # columns looked at together
NUM_WARPS = 16
WEIGHT_ONE: tl.constexpr = tl.constexpr(2.0**44)  # the best token's weight
MASKED_VALUE: tl.constexpr = tl.constexpr(MASKED)


@triton.jit
def _values(p_row, first, o_column, V, best, temperature, floor):
    """v of some columns of a row, -inf past its end."""
    is_column = first + o_column < V
    b_logit = tl.load(p_row + first + o_column, mask=is_column, other=float("-inf"))
    b_value = tl.div_rn(b_logit - best, tl.broadcast_to(temperature, b_logit.shape))
    return tl.where(is_column & (b_value < floor), MASKED_VALUE, b_value)


@triton.jit
def _distance(b_value):
    """int32 that grows as a value <= 0 falls: the bits of its magnitude."""
    return b_value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _weight(b_value):
    return (tl.exp(b_value) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def _find(p_row, V, best, temperature, floor, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The least distance with target <= the sum over all columns at most so far; and the sum of those nearer.

    Its 31 bits are found four at a time, each time with one walk over the row.
    """
    DIGIT_BITS: tl.constexpr = 4
    NUM_DIGITS: tl.constexpr = 8
    o_column, o_digit = tl.arange(0, BLOCK), tl.arange(0, 16)
    low, nearer = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    shift = tl.full((), DIGIT_BITS * (NUM_DIGITS - 1), tl.int64)
    for _ in range(NUM_DIGITS):
        o_limit = low + ((o_digit.to(tl.int64) + 1) << shift) - 1
        b_sum = tl.zeros((16,), tl.int64)
        for first in range(0, V, BLOCK):
            b_value = _values(p_row, first, o_column, V, best, temperature, floor)
            is_near = (_distance(b_value).to(tl.int64)[:, None] <= o_limit[None, :]) & (first + o_column < V)[:, None]
            if BY_MASS:
                b_sum += tl.sum(tl.where(is_near, _weight(b_value)[:, None], 0), axis=0)
            else:
                b_sum += tl.sum(is_near.to(tl.int64), axis=0)
        digit = tl.sum((b_sum < target).to(tl.int64), axis=0)  # sums do not fall
        nearer = tl.maximum(nearer, tl.max(tl.where(o_digit < digit, b_sum, 0), axis=0))
        low += digit << shift
        shift -= DIGIT_BITS
    return low, nearer


@triton.jit(do_not_specialize=["V"])
def draw_tokens_kernel(
    p_logits, p_row, p_key, p_temperature, p_floor, p_top_k, p_top_p, p_out, V,
    WORD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The formula of this file, for the rows that `p_row` names but for those whose out is NO_BEST: it stays.

    Grid: (drawn rows). A program owns a row; it walks over it once for its best logit, eight times for each filter that
    is on (a radix search, four bits at a time), once to draw. Reads logits fp32, writes out[row] int64. Masses int64,
    noise and scores fp64. WORD divides V.
    """
    wait_for_inputs(PDL)
    V = V // WORD * WORD
    i_draw = tl.program_id(0).to(tl.int64)
    i_row, key = tl.load(p_row + i_draw), tl.load(p_key + i_draw)
    if tl.load(p_out + i_row) == NO_BEST:
        return
    temperature, floor = tl.load(p_temperature + i_draw), tl.load(p_floor + i_draw)
    top_k, top_p = tl.load(p_top_k + i_draw), tl.load(p_top_p + i_draw)
    p_logits += i_row * V
    o_column = tl.arange(0, BLOCK)

    b_best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, V, BLOCK):
        b_logit = tl.load(p_logits + first + o_column, mask=first + o_column < V, other=float("-inf"))
        b_best = tl.maximum(b_best, b_logit)
    best = tl.max(b_best, axis=0)

    last = tl.full((), 0x7FFFFFFF, tl.int64)  # the farthest distance that is kept, and how many of those so far
    num_last = tl.full((), 0, tl.int64) + V
    total = tl.full((), 0, tl.int64)
    if top_k < V:
        last, num_nearer = _find(p_logits, V, best, temperature, floor, top_k, False, BLOCK)
        num_last = top_k - num_nearer
    if top_p < 1.0:
        b_mass = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, V, BLOCK):
            b_value = _values(p_logits, first, o_column, V, best, temperature, floor)
            is_nearer = (_distance(b_value).to(tl.int64) < last) & (first + o_column < V)
            b_mass += tl.where(is_nearer, _weight(b_value), 0)
        nearer = tl.sum(b_mass, axis=0)
        if top_k < V:
            total = nearer + num_last * _weight(-last.to(tl.int32).to(tl.float32, bitcast=True))
        else:
            total = nearer
        target = tl.maximum(tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total), 1)
        if nearer < target:  # inside the ties at the end of top_k
            weight = _weight(-last.to(tl.int32).to(tl.float32, bitcast=True))
            num_last = tl.minimum(num_last, (target - nearer + weight - 1) // tl.maximum(weight, 1))
        else:
            last, nearer = _find(p_logits, V, best, temperature, floor, target, True, BLOCK)
            weight = _weight(-last.to(tl.int32).to(tl.float32, bitcast=True))
            num_last = (target - nearer + weight - 1) // tl.maximum(weight, 1)

    b_score, b_id = tl.full((BLOCK,), float("-inf"), tl.float64), o_column
    num_seen = tl.full((), 0, tl.int64)
    for first in range(0, V, BLOCK):
        b_value = _values(p_logits, first, o_column, V, best, temperature, floor)
        b_distance, is_column = _distance(b_value).to(tl.int64), first + o_column < V
        is_last = ((b_distance == last) & is_column).to(tl.int64)
        is_kept = is_column & ((b_distance < last) | ((is_last != 0) & (num_seen + tl.cumsum(is_last, 0) <= num_last)))
        num_seen += tl.sum(is_last, axis=0)
        b_new = b_value.to(tl.float64) + gumbel_of(key, (first + o_column).to(tl.int64))
        is_better = is_kept & (b_new > b_score)
        b_score, b_id = tl.where(is_better, b_new, b_score), tl.where(is_better, first + o_column, b_id)
    is_best = b_score == tl.max(b_score, axis=0)
    tl.store(p_out + i_row, tl.min(tl.where(is_best, b_id, 0x7FFFFFFF), axis=0).to(tl.int64))


class Draws(NamedTuple):
    """Rows of logits [N, V] to draw from, and how: M of them, all tensors on the logits' device."""

    rows: Tensor  # int64 [M]
    keys: Tensor  # int64 [M], of `position_keys`
    temperature: Tensor  # fp32 [M], > 0
    floor: Tensor  # fp32 [M], log of min_p; -inf for none
    top_k: Tensor  # int64 [M], >= 1; V or more for none
    top_p: Tensor  # fp64 [M], > 0; 1 for none

    def split(self, num_rows: int) -> Iterator["Draws"]:
        """The same in parts of `num_rows` rows, the last one less."""
        return map(Draws._make, zip(*(tensor.split(num_rows) for tensor in self), strict=True))


def draw_tokens_reference(logits: Tensor, draws: Draws) -> Tensor:
    """The token of each drawn row, int64 [M]. logits: [N, V] fp32."""
    rows, keys, temperature, floor, top_k, top_p = draws
    values = logits[rows]
    values = (values - values.amax(dim=-1, keepdim=True)) / temperature[:, None]
    values.masked_fill_(values < floor[:, None], MASKED)
    chosen = torch.empty_like(rows)
    vocab_size = values.shape[1]
    is_filtered = (top_k < vocab_size) | (top_p < 1.0)
    pending = (~is_filtered).nonzero()[:, 0]
    if len(pending):
        scores = gumbel_noise(keys[pending, None], torch.arange(vocab_size, device=logits.device))
        chosen[pending] = scores.add_(values[pending]).argmax(dim=-1)
    pending = is_filtered.nonzero()[:, 0]
    depth = int(torch.where(top_k < vocab_size, top_k, _FIRST_DEPTH).max()) if len(pending) else 0
    while len(pending):  # only the best tokens, as deep as each row needs, are looked at
        best = best_ids(values[pending], min(depth, vocab_size))
        kept, is_deep_enough = _filter(values[pending], best, top_k[pending], top_p[pending])
        scores = kept + gumbel_noise(keys[pending, None], best)
        chosen[pending] = best.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
        pending = pending[~is_deep_enough]
        depth *= 8
    return chosen


def _filter(values: Tensor, best: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Apply top_k, then top_p to what it left.

    Args:
        values: [M, V] fp32, at most 0.
        best: [M, K] int64, the ids of the K best, best first; K >= every top_k.

    Returns:
        [M, K] fp64: the values of `best`, -inf where filtered out; and [M] bool: K was enough to tell.
    """
    vocab_size, depth = values.shape[1], best.shape[1]
    has_top_k, top_p = (top_k < vocab_size)[:, None], top_p[:, None]
    in_top_k = torch.arange(depth, device=values.device) < top_k[:, None]
    of_best = values.gather(1, best)
    weights = weights_of(of_best).masked_fill_(~in_top_k, 0)
    mass = weights.cumsum(dim=-1)  # of integers
    total = mass[:, -1:]
    if not has_top_k.all():
        total = torch.where(has_top_k, total, weights_of(values).sum(dim=-1, keepdim=True))
    limit = torch.where(
        top_p < 1.0, (top_p * total).ceil().long().minimum(total).clamp(min=1), torch.iinfo(torch.int64).max
    )
    kept = in_top_k & (mass - weights < limit)
    is_deep_enough = (mass[:, -1:] >= limit) | (depth >= top_k[:, None].clamp(max=vocab_size))
    return of_best.double().masked_fill_(~kept, -math.inf), is_deep_enough[:, 0]


def weights_of(values: Tensor) -> Tensor:
    """exp(values) as int64 in units of 2**-44, values <= 0 in fp32; sums of it do not depend on their order."""
    return values.exp().mul_(WEIGHT_ONE.value).long()


def best_ids(values: Tensor, depth: int) -> Tensor:
    """[M, depth] int64: ids of the greatest of values [M, V] fp32, best first, ties to the lowest id.

    Value and id are packed into one integer, so that the order is total and no selection can differ.
    """
    bits = (values + 0.0).view(torch.int32)  # -0 and 0 are one value
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ordered <<= 32
    ordered += torch.arange(0xFFFFFFFF, 0xFFFFFFFF - values.shape[1], -1, device=values.device)
    return 0xFFFFFFFF - (ordered.topk(depth, dim=-1).values & 0xFFFFFFFF)


def rows_of_cpu_chunk(logits: Tensor) -> int:
    """Rows of logits [N, V] to work on at once."""
    return max(1, _CPU_CHUNK // logits.shape[1])


def draw_tokens(out: Tensor, logits: Tensor, draws: Draws) -> None:
    """Write `draw_tokens_reference` into out[rows], int64 [N]; on a GPU in one launch without synchronisation.

    A row whose out is NO_BEST has nothing to draw from, and keeps it.
    """
    if logits.is_cuda:
        draw_tokens_on_gpu(out, logits, draws)
        return
    for part in draws.split(rows_of_cpu_chunk(logits)):
        before = out[part.rows]
        out[part.rows] = torch.where(before == NO_BEST.value, before, draw_tokens_reference(logits, part))


def draw_tokens_on_gpu(out: Tensor, logits: Tensor, draws: Draws, block: int = BLOCK) -> None:
    """The kernel behind `draw_tokens`. logits: contiguous. Raises ValueError for dtypes that do not fit."""
    rows, keys, temperature, floor, top_k, top_p = draws
    dtypes = [tensor.dtype for tensor in (out, logits, *draws)]
    int64, fp32 = torch.int64, torch.float32
    if dtypes != [int64, fp32, int64, int64, fp32, fp32, int64, torch.float64] or not logits.is_contiguous():
        raise ValueError(f"draw_tokens: dtypes {dtypes}, logits' strides {logits.stride()}")
    vocab_size = logits.shape[1]
    if len(rows):
        draw_tokens_kernel[(len(rows),)](
            logits, rows, keys, temperature, floor, top_k, top_p, out, vocab_size, 1 if vocab_size % 4 else 4, block,
            num_warps=NUM_WARPS, **pdl(logits.device),
        )  # fmt: skip
