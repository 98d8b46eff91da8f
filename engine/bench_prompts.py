"""Prompts of a given number of tokens for a server whose tokenizer is not at hand."""

import random
from collections.abc import Iterator
from typing import Any, Self

from mambalign.engine.api_client import ApiClient, ServerError
from mambalign.engine.bench_traffic import stdlib_sources

MOST_CHARACTERS = 8  # of a token of source text, with room to spare
FIRST_GUESS = 4  # characters a token
SAMPLE_CHARACTERS = 4000


class PromptSource:
    """Cuts source text of the standard library into pieces, each but once until the library has been used up.

    Pieces have exactly the tokens asked for where the server has /tokenize and /detokenize, and else about as many, by
    the mean that it told of one prompt. Joined pieces may have a token less or more.
    """

    def __init__(self, client: ApiClient, model: str, rng: random.Random):
        self._client, self._model, self._rng = client, model, rng
        self._characters_a_token: float | None = None  # None: the server tokenizes
        self._sources: Iterator[str] = iter(())
        self._text, self._at = "", 0

    @classmethod
    async def open(cls, client: ApiClient, model: str, rng: random.Random) -> Self:
        """Find out what the server can. Raises ServerError."""
        source = cls(client, model, rng)
        text = source._next_characters(SAMPLE_CHARACTERS)
        try:
            await source._cut(text, 1)
        except ServerError:
            body = {"model": model, "prompt": text, "max_tokens": 1}
            usage: dict[str, Any] = (await client.ask("POST", "/v1/completions", body)).get("usage") or {}
            num_tokens = usage.get("prompt_tokens") or len(text) / FIRST_GUESS
            source._characters_a_token = len(text) / num_tokens
        return source

    async def take(self, num_tokens: int) -> str:
        """The next piece; the empty text for 0."""
        return await self._piece(num_tokens, "")

    async def take_new(self, num_tokens: int) -> str:
        """A piece that begins as no other does, for the beginning of a prompt that no cache may know."""
        return await self._piece(num_tokens, f"# {self._rng.getrandbits(64):016x}\n")

    async def _piece(self, num_tokens: int, start: str) -> str:
        if num_tokens == 0:
            return ""
        if self._characters_a_token is not None:
            return self._advance(start, start + self._next_characters(int(num_tokens * self._characters_a_token)))
        text = start + self._next_characters(num_tokens * MOST_CHARACTERS)
        return self._advance(start, await self._cut(text, num_tokens))

    def _advance(self, start: str, piece: str) -> str:
        self._at += max(0, len(piece) - len(start))
        return piece

    def _next_characters(self, num_characters: int) -> str:
        """What comes next; it stays until `_advance` passes it."""
        while len(self._text) - self._at < num_characters:
            module = next(self._sources, None)
            if module is None:
                self._sources = stdlib_sources()
                continue
            self._text, self._at = self._text[self._at :] + module, 0
        return self._text[self._at : self._at + num_characters]

    async def _cut(self, text: str, num_tokens: int) -> str:
        """The first `num_tokens` tokens of a text."""
        answer = await self._client.ask("POST", "/tokenize", {"model": self._model, "prompt": text})
        ids = tokens_of(answer)[:num_tokens]
        answer = await self._client.ask("POST", "/detokenize", {"model": self._model, "tokens": ids})
        if not isinstance(answer, dict) or not isinstance(answer.get("prompt"), str):
            raise ServerError("/detokenize answers in a form of its own")
        return answer["prompt"]


def tokens_of(answer: Any) -> list[int]:
    """Raises ServerError."""
    if not isinstance(answer, dict) or not isinstance(answer.get("tokens"), list):
        raise ServerError("/tokenize answers in a form of its own")
    return answer["tokens"]
