"""Drafts without a model: what followed the last few tokens when the text last held them (prompt lookup)."""

from collections.abc import Sequence


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


class NgramProposer:
    """The n-gram settings of an engine: makes the index of each request."""

    def __init__(self, num_spec_tokens: int, min_n: int = 2, max_n: int = 4) -> None:
        if num_spec_tokens < 1:
            raise ValueError(f"num_spec_tokens must be at least 1, got {num_spec_tokens}")
        self.num_spec_tokens = num_spec_tokens
        self.min_n = min_n
        self.max_n = max_n

    def new_index(self) -> NgramIndex:
        return NgramIndex(self.min_n, self.max_n)

    def propose(self, token_ids: Sequence[int]) -> list[int]:
        """Drafts after a whole text, without an index kept between calls."""
        index = self.new_index()
        index.extend(token_ids)
        return index.propose(self.num_spec_tokens)
