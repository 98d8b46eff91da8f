"""The part that all tool-call formats share: text outside of calls is content, a tag begins a block of calls.

A parser reads a character at a time and writes an `AssistantDelta`. What it has said it cannot take back, so a call
begins when its name is known, and a block that turns out wrong before that is content, tags and all.
"""

from typing import Any, ClassVar

from mambalign.engine.server.assistant_delta import AssistantDelta
from mambalign.engine.server.tag_finder import TagFinder


class ToolParser:
    """A subclass reads what lies between the tags: `_begin` with the tag found, then `_read_block` for each character.

    White space between content and a call, and around calls without content, belongs to neither.
    """

    open_tags: ClassVar[tuple[str, ...]]
    tags: ClassVar[tuple[str, ...]]  # all that the text must show, whether or not they are special tokens

    def __init__(self, parameters: dict[str, dict[str, Any]]):
        """`parameters`: function name -> JSON schema of its arguments."""
        self.delta = AssistantDelta()
        self.num_calls = 0
        self._parameters = parameters
        self._finder = TagFinder(*self.open_tags)
        self._space = ""  # of the content, not said yet
        self._block: str | None = None  # the block so far with the space before it, while it may become content
        self._is_inside = False
        self._has_content = False

    def read(self, char: str) -> None:
        if self._is_inside:
            if self._block is not None:
                self._block += char
            self._read_block(char)
            return
        released, tag = self._finder.read(char)
        self._say(released)
        if tag:
            self._block, self._space, self._is_inside = self._space + tag, "", True
            self._begin(tag)

    def finish(self) -> None:
        if self._is_inside:
            self._give_up()
        self._say(self._finder.finish())
        if not self.num_calls:
            self.delta.content += self._space
        self._space = ""

    def _begin(self, tag: str) -> None:
        raise NotImplementedError

    def _read_block(self, char: str) -> None:
        raise NotImplementedError

    def _begin_call(self, name: str) -> None:
        self.delta.begin_call(self.num_calls, name)
        self.num_calls += 1
        self._block = None

    def _add_arguments(self, text: str) -> None:
        """Of the last call that began."""
        self.delta.add_arguments(self.num_calls - 1, text)

    def _leave(self) -> None:
        """The block has ended as it should."""
        self._is_inside, self._block = False, None

    def _give_up(self) -> None:
        """The block is none, or ends too early: content, if no call of it has begun."""
        block = self._block or ""
        self._leave()
        for char in block:
            self._say(char)

    def _say(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self._space += char
            else:
                is_behind_calls = self.num_calls and not self._has_content
                self.delta.content += char if is_behind_calls else self._space + char
                self._space, self._has_content = "", True
