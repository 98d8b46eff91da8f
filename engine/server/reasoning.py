"""Splits `<think>...</think>` from the answer that follows it, a character at a time."""

import bisect
from collections.abc import Callable
from typing import Literal

from mambalign.engine.server.tag_finder import TagFinder

OPEN, CLOSE = "<think>", "</think>"
# Where a reply begins: inside the reasoning (the prompt ends with the open tag), before it, or behind it.
ReasoningStart = Literal["inside", "before", "behind"]
Emit = Callable[[str], None]


class ReasoningReader:
    """Sends each part to `reasoning` or `content`. White space around the tags belongs to neither.

    Without an open tag at its very beginning a reply that starts "before" is content throughout. A reasoning that is
    never closed is reasoning to its end.
    """

    def __init__(self, start: ReasoningStart, reasoning: Emit, content: Emit):
        self._reasoning, self._content = reasoning, content
        self._held = ""  # before: what may be the open tag; inside: white space that the close tag may follow
        self._finder = TagFinder(CLOSE)
        self._has_begun = False  # the part being read has had something else than white space
        self._read = {"before": self._read_before, "inside": self._read_inside, "behind": content}[start]

    def read(self, char: str) -> None:
        self._read(char)

    def finish(self) -> None:
        if self._read == self._read_before:
            self._content(self._held)
        elif self._read == self._read_inside:
            for char in self._finder.finish():
                self._think(char)
            self._reasoning(self._held)
        self._held = ""

    def _read_before(self, char: str) -> None:
        self._held += char
        tag = self._held.lstrip()
        if tag == OPEN:
            self._held, self._read = "", self._read_inside
        elif not OPEN.startswith(tag):
            held, self._held, self._read = self._held, "", self._content
            self._content(held)

    def _read_inside(self, char: str) -> None:
        released, tag = self._finder.read(char)
        for each in released:
            self._think(each)
        if tag:
            self._held, self._read = "", self._skip_space

    def _think(self, char: str) -> None:
        if not char.isspace():
            self._reasoning(self._held + char)
            self._held, self._has_begun = "", True
        elif self._has_begun:
            self._held += char

    def _skip_space(self, char: str) -> None:
        if not char.isspace():
            self._read = self._content
            self._content(char)


def num_reasoning_tokens(decode: Callable[[list[int]], str], token_ids: list[int], start: ReasoningStart) -> int:
    """How many of a reply's tokens belong to its reasoning, up to the one that completes the close tag."""
    text = decode(token_ids)
    if start == "behind" or (start == "before" and not text.lstrip().startswith(OPEN)):
        return 0
    if CLOSE not in text:
        return len(token_ids)
    return bisect.bisect_left(range(len(token_ids)), True, key=lambda count: CLOSE in decode(token_ids[:count]))
