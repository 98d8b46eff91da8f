"""The text and bytes of single tokens, and log-probabilities in the API's two styles."""

import codecs
from typing import TYPE_CHECKING, Any

from mambalign.engine.messages import TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOWEST_LOGPROB = -9999.0  # JSON has no -inf


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE vocabularies (GPT-2): printable bytes are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenText:
    """Token id -> its bytes and a text for people; remembers what it was asked."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer
        self._added = {int(token_id): str(t) for token_id, t in tokenizer.added_tokens_decoder.items()}
        decoder = repr(tokenizer.backend_tokenizer.decoder)
        self._alphabet = byte_level_alphabet() if "ByteLevel" in decoder else {}
        self._bytes: dict[int, bytes] = {}
        self.max_token_chars = max(map(len, tokenizer.get_vocab()))  # no token stands for a longer text

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; those of one character may be spread over several tokens."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # an id past the vocabulary: padded embedding rows
            return b""
        if self._alphabet and all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        return self._tokenizer.decode([token_id]).encode()

    def text_of(self, token_id: int) -> str:
        """The token's text; "bytes:\\xe2\\x82" when it is part of a character, as OpenAI writes it."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokens: TokenText, ids: list[int], logprobs: list[TokenLogprobs], top: int) -> dict:
    """OpenAI's chat style: a list of tokens, each with its `top` alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokens.bytes_of(token_id)
        text = tokens.text_of(token_id)
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data)}

    return {
        "content": [
            entry(token_id, lp.logprob)
            | {"top_logprobs": [entry(*pair) for pair in list(zip(lp.top_ids, lp.top_logprobs, strict=True))[:top]]}
            for token_id, lp in zip(ids, logprobs, strict=True)
        ]
    }  # fmt: skip


def prompt_logprobs(tokens: TokenText, ids: list[int], logprobs: list[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """Of each token of a prompt, as other servers tell them: null for the first, then token id -> its entry.

    An entry's rank counts from 1; null for the prompt's own token when it is not among the alternatives.
    """
    lists: list[dict[str, Any] | None] = [None]
    for token_id, lp in zip(ids[1:], logprobs, strict=True):
        entries = {str(token_id): {"logprob": max(lp.logprob, LOWEST_LOGPROB), "rank": None}}
        for i, (top_id, value) in enumerate(zip(lp.top_ids, lp.top_logprobs, strict=True)):
            entries[str(top_id)] = {"logprob": max(value, LOWEST_LOGPROB), "rank": i + 1}
        for key, entry in entries.items():
            entry["decoded_token"] = tokens.text_of(int(key))
        lists.append(entries)
    return lists


class CompletionLogprobs:
    """OpenAI's older style for one choice: parallel lists. Counts characters, so a stream goes on where it was."""

    def __init__(self, tokens: TokenText):
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, ids: list[int], logprobs: list[TokenLogprobs | None], num_textless: int = 0) -> dict[str, list[Any]]:
        """The lists for the next tokens. `top_logprobs` also holds the token that was taken.

        A token without log-probabilities (the first of a prompt) has null; the first `num_textless` tokens (a start
        token that the tokenizer put there) are no part of the text.
        """
        offsets, tops = [], []
        for i, (token_id, lp) in enumerate(zip(ids, logprobs, strict=True)):
            offsets.append(self._offset)
            if i >= num_textless:
                self._offset += len(self._decoder.decode(self._tokens.bytes_of(token_id)))
            if lp is None:
                tops.append(None)
                continue
            top: dict[str, float] = {}
            for top_id, value in zip(lp.top_ids, lp.top_logprobs, strict=True):
                top.setdefault(self._tokens.text_of(top_id), max(value, LOWEST_LOGPROB))
            top.setdefault(self._tokens.text_of(token_id), max(lp.logprob, LOWEST_LOGPROB))
            tops.append(top)
        return {
            "tokens": [self._tokens.text_of(token_id) for token_id in ids],
            "token_logprobs": [max(lp.logprob, LOWEST_LOGPROB) if lp else None for lp in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
