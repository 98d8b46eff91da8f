"""Finds markup tags in text that comes a character at a time, so that no cut of the text can show."""


class TagFinder:
    """Looks for any of `tags`, of which none begins another; holds back what may still become one."""

    def __init__(self, *tags: str):
        self._tags = tags
        self._held = ""

    def read(self, char: str) -> tuple[str, str | None]:
        """The text that is no part of a tag any more, and the tag that `char` completed, if any."""
        held, released = self._held + char, ""
        if held in self._tags:
            self._held = ""
            return "", held
        while held and not any(tag.startswith(held) for tag in self._tags):
            released += held[0]
            held = held[1:]
        self._held = held
        return released, None

    def finish(self) -> str:
        """The text ended: what was held is ordinary."""
        held, self._held = self._held, ""
        return held
