"""Log-probabilities of tokens, a row at a time and without waiting for the device.

A row's numbers depend on that row's logits alone: maxima, integer sums and selections under a total order only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mambalign.kernels.draw_tokens import WEIGHT_ONE, best_ids, rows_of_cpu_chunk, weights_of
from mambalign.worker.host_copy import HostCopy, to_device
from mambalign.worker.sampling_params import TokenLogprobs


class LogprobCopy:
    """Log-softmax of rows of logits at a token each and at their best tokens, on its way to the host."""

    def __init__(self, logits: Tensor, token_ids: Tensor, counts: Sequence[int | None]):
        """logits [N, V] fp32; token_ids int64 [N]; counts: best tokens of each row, 0..V, or None: not asked for.

        Of a row whose logits hold a NaN, or whose best one is infinite, every number is NaN.
        """
        self._counts = counts
        self._asked = [i for i, count in enumerate(counts) if count is not None]
        if self._asked:
            rows = to_device(self._asked, torch.int64, logits.device)
            depth = min(max(counts[i] for i in self._asked), logits.shape[1])
            num_rows = rows_of_cpu_chunk(logits) if logits.device.type == "cpu" else len(rows)
            parts = [_numbers(logits[part], token_ids[part], depth) for part in rows.split(num_rows)]
            self._numbers = HostCopy(torch.cat(parts))

    def entries(self) -> list[TokenLogprobs | None]:
        """One a row; waits for the device."""
        entries: list[TokenLogprobs | None] = [None] * len(self._counts)
        for i, numbers in zip(self._asked, self._numbers.wait().tolist() if self._asked else [], strict=True):
            (logprob, *best), count = numbers, self._counts[i]
            top_ids = [int(token) for token in best[: len(best) // 2][:count]]
            entries[i] = TokenLogprobs(logprob, top_ids, best[len(best) // 2 :][:count])
        return entries


def _numbers(logits: Tensor, token_ids: Tensor, depth: int) -> Tensor:
    """fp64 [M, 1 + 2 * depth]: log-probabilities of the tokens, ids of the best ones, their log-probabilities."""
    relative = logits - logits.amax(dim=-1, keepdim=True)
    log_mass = (weights_of(relative).sum(dim=-1, keepdim=True).double() / WEIGHT_ONE.value).log().float()
    parts = [(relative.gather(1, token_ids[:, None].clamp(min=0)) - log_mass).double()]
    if depth:
        best = best_ids(logits, depth)
        parts += [best.double(), (relative.gather(1, best) - log_mass).double()]
    return torch.cat(parts, dim=1)
