"""From logits to tokens: bias, penalties, filters, noise and log-probabilities of the rows of one step.

A row's result is a function of that row's logits and request alone, bit for bit, whatever else is in the step.
So the file uses elementwise operations, maxima, integer sums and selections under a total order only: none of
them has an order of evaluation that shows. A probability is summed as an integer, in units of 2**-44 of the
row's best token. Ties go to the lowest token id.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mambalign.worker.sampling_params import SamplingParams, TokenLogprobs

_WEIGHT_ONE = 2.0**44  # the best token's weight; 2**19 tokens of it still fit a signed 64-bit sum
_MAX_VOCAB = 2**19 - 1
_FIRST_DEPTH = 256  # best tokens looked at for a top_p without top_k; 8 times more until they hold the mass
_CPU_CHUNK = 2**15  # logits worked on at once: temporaries stay in the cache, and one core does not wait for two
_MASKED = torch.finfo(torch.float32).min  # finite: a row that is masked everywhere still has a maximum
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = 2**64 - 1


@dataclass(slots=True)
class SampleRow:
    """The request behind one row of logits.

    The token lists are read when `params.needs_history` only, and not changed; of `output_token_ids` the
    length counts too (`min_tokens`). In a run of drafts, row j's outputs include the j drafts before it.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # generated before the token that is sampled here
    position: int  # absolute position, in prompt + output, of the token that is sampled here
    choice: int = 0  # which of the request's n
    allowed: np.ndarray | None = None  # tokens that a grammar allows here, uint8 bits, lowest first; None: all


@dataclass(slots=True)
class SamplerOutput:
    """One entry per row: the token, and its log-probabilities where the request asked for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Chooses the next token of every row.

    Order, as other servers have it: log-probabilities are of the logits as they come; then `logit_bias`,
    penalties, the `min_tokens` mask, a grammar's mask; greedy rows take the best token; the others divide by the
    temperature, filter by `min_p`, `top_k`, `top_p` and take the best of log-probability + Gumbel noise (which samples
    from the softmax: Maddison, Tarlow, Minka, "A* sampling", 2014, section 2).
    """

    def __init__(self, eos_token_ids: Iterable[int] = ()) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> SamplerOutput:
        """Sample one token per row.

        Args:
            logits: [N, V] fp32, V < 2**19; not changed.
            rows: N entries; a row that is not greedy has a seed.

        Raises:
            ValueError: shapes or dtype do not fit, or a seed is missing.
        """
        if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[1] > _MAX_VOCAB:
            raise ValueError(f"logits must be [N, V] in float32, got {list(logits.shape)} in {logits.dtype}")
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} requests")
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if all(row.params.is_plain_greedy for row in rows):
            return SamplerOutput(logits.argmax(dim=-1).tolist(), logprobs)
        changed = self._changed_logits(logits, rows)
        token_ids = [0] * len(rows)
        for condition, choose in (
            (_is_greedy, _choose_best),
            (_draws_from_all, _choose_by_noise),
            (_draws_from_few, _choose_among_best),
        ):
            for group in _chunks([i for i, row in enumerate(rows) if condition(row.params)], logits):
                chosen = choose(_take_rows(changed, group), [rows[i] for i in group])
                for i, token_id in zip(group, chosen, strict=True):
                    token_ids[i] = token_id
        for group in _chunks([i for i, row in enumerate(rows) if row.params.logprobs is not None], logits):
            counts = [rows[i].params.logprobs or 0 for i in group]
            entries = token_logprobs(_take_rows(logits, group), [token_ids[i] for i in group], counts)
            for i, entry in zip(group, entries, strict=True):
                logprobs[i] = entry
        return SamplerOutput(token_ids, logprobs)

    def _changed_logits(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        changed = logits
        for i, row in enumerate(rows):
            if row.params.changes_logits:
                if changed is logits:
                    changed = logits.clone()
                self._change_row(changed[i], row)
        return changed

    def _change_row(self, logits: Tensor, row: SampleRow) -> None:
        """Apply bias, penalties and mask to one row [V], in place."""
        params = row.params
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=logits.device)
            logits[ids] += bias
        if params.needs_history:
            _apply_penalties(logits, row)
        # The mask comes last, so that no factor can bring a masked token back.
        if len(row.output_token_ids) < params.min_tokens:
            ends = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
            if ends:
                logits[torch.tensor(sorted(ends), device=logits.device)] = _MASKED
        if row.allowed is not None:
            logits.masked_fill_(~_unpack(row.allowed, logits), _MASKED)


def _unpack(bits: np.ndarray, logits: Tensor) -> Tensor:
    """[V] bool on the logits' device."""
    packed = torch.from_numpy(bits.copy()).to(logits.device)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    return (packed[:, None] >> places & 1).flatten()[: logits.shape[0]].bool()


def verify_drafts(target_token_ids: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> list[int]:
    """Count the tokens that each row keeps from a step.

    Row r has the target's own tokens at len(drafts[r]) + 1 positions; draft j is accepted while it and all
    before it equal the target's token there. Returns 1 + accepted drafts per row: `num_accepted`.
    """
    num_accepted = []
    for targets, draft in zip(target_token_ids, drafts, strict=True):
        if len(targets) != len(draft) + 1:
            raise ValueError(f"{len(draft)} drafts need {len(draft) + 1} target tokens, got {len(targets)}")
        matches = 0
        while matches < len(draft) and draft[matches] == targets[matches]:
            matches += 1
        num_accepted.append(1 + matches)
    return num_accepted


def token_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-softmax of each row at its token and at its best `counts[i]` tokens.

    Args:
        logits: [M, V] fp32.
        token_ids: M ids.
        counts: M numbers of alternatives, 0..V.
    """
    relative = logits - logits.amax(dim=-1, keepdim=True)
    mass = _weights(relative).sum(dim=-1, keepdim=True).double() / _WEIGHT_ONE
    log_mass = mass.log().float()
    taken = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    taken_logprobs = (relative.gather(1, taken) - log_mass).squeeze(1).tolist()
    top_ids: list[list[int]] = [[]] * len(counts)
    top_logprobs: list[list[float]] = [[]] * len(counts)
    if max(counts) > 0:
        best = _best_ids(logits, min(max(counts), logits.shape[1]))
        top_ids = best.tolist()
        top_logprobs = (relative.gather(1, best) - log_mass).tolist()
    return [
        TokenLogprobs(taken_logprobs[i], top_ids[i][:count], top_logprobs[i][:count]) for i, count in enumerate(counts)
    ]


def noise_key(seed: int, choice: int, position: int) -> int:
    """Hash (seed, choice, position) to the 64-bit key of one position's noise."""
    key = 0
    for value in (seed, choice, position):
        z = ((key ^ (value & _MASK_64)) + _GOLDEN) & _MASK_64
        z = ((z ^ (z >> 30)) * _MIX_1) & _MASK_64
        z = ((z ^ (z >> 27)) * _MIX_2) & _MASK_64
        key = z ^ (z >> 31)
    return key


def noise_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Counter-based random bits: SplitMix64's output number `token_id` of the stream that starts at `key`.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16 (with
    the constants of Stafford's Mix13). int64 arithmetic that wraps: the same bits on every device.

    Args:
        keys: int64, broadcast against token_ids; `noise_key` as a signed number.
        token_ids: int64.

    Returns:
        int64, all 64 bits random.
    """
    z = (token_ids + 1) * _signed(_GOLDEN) + keys
    z ^= _shift_right(z, 30)
    z *= _signed(_MIX_1)
    z ^= _shift_right(z, 27)
    z *= _signed(_MIX_2)
    z ^= _shift_right(z, 31)
    return z


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, -log(-log(u)) in fp64, u = (52 bits of `noise_bits` + 1/2) / 2**52, never 0 or 1.

    fp64 leaves devices whose logarithms differ in the last place about 1e-14 of a chance to disagree on a
    token. Shapes as `noise_bits`.
    """
    uniform = _shift_right(noise_bits(keys, token_ids), 12).double()
    return uniform.add_(0.5).mul_(2.0**-52).log_().neg_().log_().neg_()


def _chunks(group: list[int], logits: Tensor) -> Iterator[list[int]]:
    num_rows = max(1, _CPU_CHUNK // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(group))
    return (group[start : start + num_rows] for start in range(0, len(group), num_rows))


def _is_greedy(params: SamplingParams) -> bool:
    return params.is_greedy


def _draws_from_few(params: SamplingParams) -> bool:
    return not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0)


def _draws_from_all(params: SamplingParams) -> bool:
    return not params.is_greedy and not _draws_from_few(params)


def _take_rows(logits: Tensor, group: list[int]) -> Tensor:
    return logits if len(group) == logits.shape[0] else logits[torch.tensor(group, device=logits.device)]


def _choose_best(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    return logits.argmax(dim=-1).tolist()


def _choose_by_noise(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    scores = gumbel_noise(_noise_keys(rows, logits.device), token_ids)
    scores += _tempered(logits, rows)
    return scores.argmax(dim=-1).tolist()


def _choose_among_best(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Sample rows with top_k or top_p: only the best tokens, as deep as each row needs, are looked at."""
    tempered = _tempered(logits, rows)
    vocab_size = logits.shape[1]
    chosen = [0] * len(rows)
    pending = list(range(len(rows)))
    depth = max(row.params.top_k if row.params.top_k > 0 else _FIRST_DEPTH for row in rows)
    while pending:
        group = [rows[i] for i in pending]
        values = _take_rows(tempered, pending)
        depth = min(depth, vocab_size)
        best = _best_ids(values, depth)
        values_of_best, is_deep_enough = _filter(values, best, group)
        scores = values_of_best + gumbel_noise(_noise_keys(group, logits.device), best)
        taken = best.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1).tolist()
        for i, token_id in zip(pending, taken, strict=True):
            chosen[i] = token_id
        pending = [i for i, done in zip(pending, is_deep_enough.tolist(), strict=True) if not done]
        depth *= 8
    return chosen


def _filter(values: Tensor, best: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
    """Apply top_k, then top_p to what it left.

    Args:
        values: [M, V] fp32, at most 0 (log-probabilities up to a constant).
        best: [M, K] int64, the ids of the K best, best first; K >= every top_k.

    Returns:
        [M, K] fp64: the values of `best`, -inf where filtered out; and [M] bool: K was enough to tell.
    """
    vocab_size, depth = values.shape[1], best.shape[1]
    column = {"device": values.device}
    kept_ranks = [min(row.params.top_k, vocab_size) if row.params.top_k > 0 else vocab_size for row in rows]
    top_ps = [row.params.top_p if row.params.top_p < 1.0 else math.inf for row in rows]
    in_top_k = torch.arange(depth, **column) < torch.tensor(kept_ranks, **column).unsqueeze(1)
    of_best = values.gather(1, best)
    weights = _weights(of_best).masked_fill_(~in_top_k, 0)
    mass = weights.cumsum(dim=-1)  # of integers
    total = mass[:, -1:]
    if any(row.params.top_k <= 0 for row in rows):
        has_no_top_k = torch.tensor([row.params.top_k <= 0 for row in rows], **column).unsqueeze(1)
        total = torch.where(has_no_top_k, _weights(values).sum(dim=-1, keepdim=True), total)
    limit = torch.tensor(top_ps, dtype=torch.float64, **column).unsqueeze(1) * total
    kept = in_top_k & (mass - weights < limit)
    kept[:, 0] = True
    is_deep_enough = mass[:, -1:] >= limit
    is_deep_enough |= depth >= torch.tensor(kept_ranks, **column).unsqueeze(1)
    return of_best.double().masked_fill_(~kept, -math.inf), is_deep_enough.squeeze(1)


def _tempered(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """[M, V] fp32: logits over temperature, the best at 0, those under min_p masked."""
    temperature = torch.tensor([row.params.temperature for row in rows], device=logits.device).unsqueeze(1)
    values = logits - logits.amax(dim=-1, keepdim=True)
    values /= temperature
    if any(row.params.min_p > 0.0 for row in rows):
        floors = [math.log(row.params.min_p) if row.params.min_p > 0.0 else -math.inf for row in rows]
        values.masked_fill_(values < torch.tensor(floors, device=logits.device).unsqueeze(1), _MASKED)
    return values


def _apply_penalties(logits: Tensor, row: SampleRow) -> None:
    """Repetition (Keskar et al., "CTRL", 2019, section 4.1, with its sign fixed), frequency, presence (OpenAI)."""
    params = row.params
    occurrences: dict[int, int] = {}  # in the output, of every token that a penalty touches
    if params.repetition_penalty != 1.0:
        occurrences = dict.fromkeys(row.prompt_token_ids, 0)
    occurrences.update(Counter(row.output_token_ids))
    if not occurrences:
        return
    ids = _int_tensor(occurrences, logits.device)
    counts = _int_tensor(occurrences.values(), logits.device)
    values = logits[ids].double()
    values = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values -= params.frequency_penalty * counts.double()
    values -= params.presence_penalty * (counts > 0)
    limits = torch.finfo(torch.float32)
    logits[ids] = values.clamp_(limits.min, limits.max).float()


def _weights(values: Tensor) -> Tensor:
    """exp(values) as int64 in units of 2**-44, values <= 0 in fp32; sums of it do not depend on their order."""
    return values.exp().mul_(_WEIGHT_ONE).long()


def _best_ids(values: Tensor, depth: int) -> Tensor:
    """[M, depth] int64: ids of the greatest of values [M, V] fp32, best first, ties to the lowest id.

    Value and id are packed into one integer, so that the order is total and no selection can differ.
    """
    bits = (values + 0.0).view(torch.int32)  # -0 and 0 are one value
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ordered <<= 32
    ordered += torch.arange(0xFFFFFFFF, 0xFFFFFFFF - values.shape[1], -1, device=values.device)
    return 0xFFFFFFFF - (ordered.topk(depth, dim=-1).values & 0xFFFFFFFF)


def _noise_keys(rows: Sequence[SampleRow], device: torch.device) -> Tensor:
    keys = []
    for row in rows:
        if row.params.seed is None:
            raise ValueError("seed must be set before a request is sampled, got None")
        keys.append(_signed(noise_key(row.params.seed, row.choice, row.position)))
    return torch.tensor(keys, device=device).unsqueeze(1)


def _int_tensor(values: Iterable[int], device: torch.device) -> Tensor:
    """int64 [number of values]; through an array, several times faster than torch's own reading of a list."""
    return torch.frombuffer(array("q", values), dtype=torch.int64).to(device)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift of int64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits
