"""The text of one request, token by token: whole characters only, and nothing that a stop string may still take.

Knows one request's tokens and stop strings; not tokens that end a request by themselves (end-of-text, stop
token ids): those belong to the token ids but not to the text, and are not appended here.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"  # what decoding gives for the bytes of a character that is not whole yet
_PROMPT_CONTEXT_TOKENS = 6  # of the prompt, decoded along: some tokenizers drop a text's leading space
_WINDOW_TOKENS = 16  # decoded again with every token, at most while the text is whole


class Detokenizer:
    """Turns tokens into text that is final when it is handed out.

    The joined results of `append` and `finish` are `tokenizer.decode(token_ids, skip_special_tokens)`, cut
    before the first stop string. Ids that the tokenizer does not know give no text.

    Args:
        tokenizer: a `tokenizers.Tokenizer` (transformers' fast tokenizers hold one as `backend_tokenizer`).
        prompt_token_ids: the prompt; its text is not given out.
        stop: stop strings, not empty.
        min_tokens: a stop string that is complete before so many tokens is ordinary text.
        skip_special_tokens: special tokens give no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self.num_tokens = 0  # appended; with a stop string found, its last token is the one that completed it
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._window = [i for i in prompt_token_ids[-_PROMPT_CONTEXT_TOKENS:] if self._is_known(i)]
        self._window_text_taken = len(self._decode_window())  # characters of the window's text already taken
        if self._decode_window().endswith(_INCOMPLETE):
            self._window, self._window_text_taken = [], 0
        self._whole_tokens = len(self._window)  # leading tokens of the window whose text is taken and whole
        self._held = ""  # taken from the window, not given out: may be the beginning of a stop string
        self._matchers = [_Matcher(text) for text in stop]

    def append(self, token_id: int) -> str:
        """Add one token and return the text that became final, often but not always the token's own.

        After a token that completes a stop string (`stop_string` is set) the text is at its end; later tokens
        do not belong to the output and are ignored.
        """
        if self.stop_string is not None:
            return ""
        self.num_tokens += 1
        if not self._is_known(token_id):
            return self._release("")
        self._window.append(token_id)
        text = self._decode_window()
        whole = len(text.rstrip(_INCOMPLETE))
        new_text = text[self._window_text_taken : whole]
        self._window_text_taken = max(self._window_text_taken, whole)
        if whole == len(text):
            self._shorten_window()
        return self._release(new_text)

    def finish(self) -> str:
        """Return what is still held: the request ended otherwise than by a stop string."""
        if self.stop_string is not None:
            return ""
        rest = self._held + self._decode_window()[self._window_text_taken :]
        self._held, self._window, self._window_text_taken = "", [], 0
        return rest

    def _release(self, new_text: str) -> str:
        """Take new text in; return what no stop string can claim any more."""
        if not self._matchers:
            return new_text
        start_of_new = len(self._held)
        self._held += new_text
        found: list[tuple[int, int]] = []  # (start in held text, number of the stop string)
        for number, matcher in enumerate(self._matchers):
            for end in matcher.advance(new_text):
                found.append((start_of_new + end - len(matcher.text), number))
        if found and self.num_tokens >= self._min_tokens:
            start, number = min(found)
            self.stop_string = self._matchers[number].text
            released, self._held = self._held[:start], ""
            return released
        num_held = max(matcher.num_matched for matcher in self._matchers)
        released, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return released

    def _decode_window(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)

    def _shorten_window(self) -> None:
        """Drop tokens whose text is taken, but keep the latest of them as context of the next."""
        if len(self._window) > _WINDOW_TOKENS:
            del self._window[: self._whole_tokens]
            self._window_text_taken = len(self._decode_window())
            self._whole_tokens = len(self._window)
        elif len(self._window) <= _WINDOW_TOKENS // 2:
            self._whole_tokens = len(self._window)

    def _is_known(self, token_id: int) -> bool:
        return 0 <= token_id < 2**32 and self._tokenizer.id_to_token(token_id) is not None


class _Matcher:
    """Finds one stop string in text that comes in pieces (Knuth, Morris, Pratt, 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0  # longest ending of the text so far that a longer text could make a match
        self._fallback = [0] * (len(text) + 1)  # [j]: the same for the first j characters of the stop string
        for j in range(1, len(text)):
            self._fallback[j + 1] = self._step(self._fallback[j], text[j])

    def advance(self, new_text: str) -> list[int]:
        """Read new text; return the ends of the matches in it, in characters from its start."""
        ends: list[int] = []
        if self.num_matched == 0 and self.text[0] not in new_text:
            return ends
        for i, character in enumerate(new_text):
            self.num_matched = self._step(self.num_matched, character)
            if self.num_matched == len(self.text):
                ends.append(i + 1)
                self.num_matched = self._fallback[self.num_matched]
        return ends

    def _step(self, num_matched: int, character: str) -> int:
        while num_matched and self.text[num_matched] != character:
            num_matched = self._fallback[num_matched]
        return num_matched + 1 if self.text[num_matched] == character else 0
