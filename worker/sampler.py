"""From logits to tokens: bias, penalties, masks and draws of the rows of one step.

A row's result is a function of that row's logits and request alone, bit for bit, whatever else is in the step.
So the file uses elementwise operations, maxima, integer sums and selections under a total order only: none of
them has an order of evaluation that shows. Ties go to the lowest token id. Nothing waits for the device.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mambalign.kernels.draw_tokens import MASKED, MAX_VOCAB, Draws, draw_tokens
from mambalign.kernels.noise import position_keys, stream_key
from mambalign.kernels.sampling import NO_BEST, argmax_rows
from mambalign.worker.host_copy import to_device
from mambalign.worker.logprobs import LogprobCopy
from mambalign.worker.sampling_params import SamplingParams

NOT_NUMBERS = "the model's logits are NaN or infinite: its forward pass overflows on this text"  # of NO_BEST

_stream_key = lru_cache(maxsize=4096)(stream_key)


@dataclass(slots=True)
class SampleRow:
    """The request behind one row of logits.

    `output_token_ids` are read when `params.needs_history` only, and not changed; in a run of drafts, row j's include
    the j drafts before it.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # generated before the token that is sampled here
    choice: int = 0  # which of the request's n
    allowed: np.ndarray | None = None  # tokens that a grammar allows here, uint8 bits, lowest first; None: all


@dataclass(slots=True)
class SamplerOutput:
    """The token of each row, int64 [N] on the device, and its log-probabilities where the request asked for them.

    A row whose logits hold a NaN, or whose best one is infinite, has NO_BEST for a token and no number that counts.
    """

    token_ids: Tensor
    logprobs: LogprobCopy


class Sampler:
    """Chooses the next token of every row.

    Order, as other servers have it: log-probabilities are of the logits as they come; then `logit_bias`,
    penalties, the `min_tokens` mask, a grammar's mask; greedy rows take the best token; the others draw one
    (`kernels/draw_tokens.py`).
    """

    def __init__(self, eos_token_ids: Iterable[int] = ()) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow], positions: Tensor) -> SamplerOutput:
        """Sample one token per row.

        Args:
            logits: [N, V] fp32, contiguous, V < 2**19; not changed.
            rows: N entries; a row that is not greedy has a seed.
            positions: int64 [N] on the device: where each token comes to stand, in prompt + output.

        Raises:
            ValueError: shapes or dtype do not fit, or a seed is missing.
        """
        if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[1] > MAX_VOCAB:
            raise ValueError(f"logits must be [N, V] in float32, got {list(logits.shape)} in {logits.dtype}")
        if not logits.shape[0] == len(rows) == len(positions):
            given = f"{logits.shape[0]} rows of logits and {len(positions)} positions"
            raise ValueError(f"{given} for {len(rows)} requests")
        changed = self._changed_logits(logits, rows, positions)
        token_ids = argmax_rows(logits)
        if changed is not logits:  # penalties would make an infinite logit finite, and a mask hide a NaN
            token_ids = torch.where(token_ids == NO_BEST.value, token_ids, argmax_rows(changed))
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if drawn:
            _draw(token_ids, changed, drawn, [rows[i] for i in drawn], positions)
        return SamplerOutput(token_ids, LogprobCopy(logits, token_ids, [row.params.logprobs for row in rows]))

    def _changed_logits(self, logits: Tensor, rows: Sequence[SampleRow], positions: Tensor) -> Tensor:
        """A copy with bias, penalties and masks, the masks last, so that no factor can bring a masked token back."""
        if not any(row.params.changes_logits for row in rows):
            return logits
        changed, vocab_size = logits.clone(), logits.shape[1]
        flat = changed.view(-1)
        biases = [(i * vocab_size + t, bias) for i, row in enumerate(rows) for t, bias in row.params.logit_bias.items()]
        if biases:
            at, values = zip(*biases, strict=True)
            at = to_device(at, torch.int64, logits.device)
            flat[at] += to_device(values, torch.float32, logits.device)
        _apply_penalties(flat, vocab_size, rows)
        self._mask_ends(flat, vocab_size, rows, positions)
        _mask_by_grammar(changed, rows)
        return changed

    def _mask_ends(self, flat: Tensor, vocab_size: int, rows: Sequence[SampleRow], positions: Tensor) -> None:
        """Mask what would end a text before it has `min_tokens`."""
        masked = []
        for i, row in enumerate(rows):
            if row.params.min_tokens > 0:
                first = len(row.prompt_token_ids) + row.params.min_tokens  # position at which the text may end
                ends = set(row.params.stop_token_ids)
                ends |= frozenset() if row.params.ignore_eos else self.eos_token_ids
                masked += [(i, i * vocab_size + token, first) for token in ends]
        if masked:
            i_row, at, first = to_device(masked, torch.int64, flat.device).unbind(1)
            flat[at] = torch.where(positions[i_row] < first, MASKED, flat[at])


def _draw(token_ids: Tensor, logits: Tensor, drawn: list[int], rows: list[SampleRow], positions: Tensor) -> None:
    whole, device = [], logits.device
    for i, row in zip(drawn, rows, strict=True):
        if row.params.seed is None:
            raise ValueError("seed must be set before a request is sampled, got None")
        top_k = row.params.top_k if row.params.top_k > 0 else logits.shape[1]
        whole.append((i, _stream_key(row.params.seed, row.choice), top_k))
    at, streams, top_k = to_device(list(zip(*whole, strict=True)), torch.int64, device).unbind()
    numbers = [
        [row.params.temperature for row in rows],
        [math.log(row.params.min_p) if row.params.min_p > 0.0 else -math.inf for row in rows],
        [row.params.top_p for row in rows],
    ]
    temperature, floor, top_p = to_device(numbers, torch.float64, device).unbind()
    keys = position_keys(streams, positions[at])
    draw_tokens(token_ids, logits, Draws(at, keys, temperature.float(), floor.float(), top_k, top_p))


def _apply_penalties(flat: Tensor, vocab_size: int, rows: Sequence[SampleRow]) -> None:
    """Repetition (Keskar et al., "CTRL", 2019, section 4.1, with its sign fixed), frequency, presence (OpenAI)."""
    places, counts, numbers = [], [], []
    for i, row in enumerate(rows):
        params = row.params
        if not params.needs_history:
            continue
        occurrences: dict[int, int] = {}  # in the output, of every token that a penalty touches
        if params.repetition_penalty != 1.0:
            occurrences = dict.fromkeys(row.prompt_token_ids, 0)
        occurrences.update(Counter(token for token in row.output_token_ids if token >= 0))  # a draft may be missing
        size = len(occurrences)
        places.append(np.fromiter(occurrences, np.int64, size) + i * vocab_size)
        counts.append(np.fromiter(occurrences.values(), np.int64, size))
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        numbers.append(np.repeat(np.array(penalties)[:, None], size, axis=1))
    if not places:
        return
    at, count = to_device(np.stack([np.concatenate(places), np.concatenate(counts)]), torch.int64, flat.device)
    repetition, frequency, presence = to_device(np.concatenate(numbers, axis=1), torch.float64, flat.device)
    values = flat[at].double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count.double()
    values -= presence * (count > 0)
    limits = torch.finfo(torch.float32)
    flat[at] = values.clamp_(limits.min, limits.max).float()


def _mask_by_grammar(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    masked = [i for i, row in enumerate(rows) if row.allowed is not None]
    if not masked:
        return
    packed = to_device(np.stack([rows[i].allowed for i in masked]), torch.uint8, logits.device)
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_allowed = (packed[:, :, None] >> places & 1).flatten(1)[:, : logits.shape[1]].bool()
    at = to_device(masked, torch.int64, logits.device)
    logits[at] = logits[at].masked_fill(~is_allowed, MASKED)
