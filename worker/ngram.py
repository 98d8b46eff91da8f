"""Drafts without a model: what followed the last few tokens when the text last held them (prompt lookup)."""

from collections.abc import Sequence

import torch


class NgramIndex:
    """Where each n-gram of one request's text was last followed by a token.

    Costs max_n - min_n + 1 dictionary entries a token, whatever the length of the text. Preemption does not
    touch it: the text is the same after it.
    """

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-gram lengths must hold 1 <= min_n <= max_n, got {min_n} and {max_n}")
        self.min_n = min_n
        self.max_n = max_n
        self.token_ids: list[int] = []
        self._next_position: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append final tokens, prompt or output, to the text."""
        for token_id in token_ids:
            # The n-grams that end just before this token; the text's own ending has no entry yet.
            for n in self._lengths():
                self._next_position[tuple(self.token_ids[-n:])] = len(self.token_ids)
            self.token_ids.append(token_id)

    def propose(self, k: int) -> list[int]:
        """Guess the next k tokens: k of them, or none when no ending of min_n..max_n tokens was seen before.

        The longest ending counts, at its most recent occurrence. Where the copied text reaches the end of what
        is known, the copy goes on with its own tokens, so that a loop is guessed at any period.
        """
        for n in reversed(self._lengths()):
            start = self._next_position.get(tuple(self.token_ids[-n:]))
            if start is not None:
                guess = self.token_ids[start : start + k]
                period = len(guess)
                while len(guess) < k:
                    guess.append(guess[-period])
                return guess
        return []

    def _lengths(self) -> range:
        return range(self.min_n, min(self.max_n, len(self.token_ids)) + 1)


def propose_ngrams(
    history: torch.Tensor, lengths: torch.Tensor, k: int, min_n: int = 2, max_n: int = 4
) -> torch.Tensor:
    """`NgramIndex.propose` for many texts at once, on their device, without reading anything back.

    history: int64 [R, L], the tokens of each text, anything behind its end. lengths: int [R], tokens of each text.
    Returns int64 [R, k]; rows without a proposal hold -1.
    """
    num_rows, width = history.shape
    columns = torch.arange(width, device=history.device)
    start = torch.full((num_rows,), -1, dtype=torch.int64, device=history.device)
    lengths = lengths.long()
    for n in range(min_n, max_n + 1):  # the longest n that matches is written last, and stays
        # windows[r, i]: the n-gram that ends just before position i equals the text's own ending
        equal = torch.ones(num_rows, width, dtype=torch.bool, device=history.device)
        for back in range(1, n + 1):
            ending = history.gather(1, (lengths - back).clamp(min=0)[:, None])
            equal &= history.roll(back, 1) == ending
        equal &= (columns >= n) & (columns < lengths[:, None]) & (lengths[:, None] >= n)
        latest = torch.where(equal, columns, -1).amax(1)
        start = torch.where(latest >= 0, latest, start)
    period = (lengths - start).clamp(min=1)[:, None]
    source = start[:, None] + torch.arange(k, device=history.device) % period
    guess = history.gather(1, source.clamp(min=0))
    return torch.where(start[:, None] >= 0, guess, -1)
