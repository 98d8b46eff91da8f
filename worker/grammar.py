"""Structured output: which tokens a request's grammar allows at each position of a step.

llguidance knows grammars and vocabularies; here is what a step needs of it: masks for the next token and for the one
after each draft, and the way back from drafts that are not kept. A state follows the tokens of its request, so it
depends on that text alone. Knows no model and no tensor.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from tokenizers import Tokenizer

from mambalign.worker.sampling_params import StructuredOutputs

_MAX_CACHED = 64
# JSON may be spread over lines; without a limit a model that likes white space might write nothing else.
_JSON_OPTIONS = {"whitespace_pattern": r"(\x20|\x0A[\x20\x09]{0,24})?"}
_CLOSE_TAG = "</think>"
_OPEN_TAG = "<think>"


class GrammarState:
    """One request's place in its grammar. `error`: why it cannot go on, if it cannot."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]):
        self.error: str | None = None
        self._matcher = matcher
        self._num_bytes = -(-vocab_size // 8)
        self._eos_token_ids = eos_token_ids
        self._num_followed = 0  # tokens of the output

    def masks(self, output_token_ids: Sequence[int], drafts: Sequence[int]) -> list[np.ndarray | None]:
        """Allowed tokens after the output, and after each draft that follows it, as bits (lowest first, uint8).

        None where anything may be sampled, because it will not be kept: behind a draft that is not allowed, or none
        (negative), or the end.
        """
        masks: list[np.ndarray | None] = [None] * (len(drafts) + 1)
        self._follow(output_token_ids)
        num_ahead = 0
        for i in range(len(masks)):
            if self._check():
                break
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: self._num_bytes]
            if self._check():
                break
            masks[i] = mask
            if i == len(drafts) or drafts[i] < 0 or drafts[i] in self._eos_token_ids:
                break
            if not self._matcher.try_consume_tokens([drafts[i]]):
                break
            num_ahead += 1
        if num_ahead and not self._matcher.is_error():
            self._matcher.rollback(num_ahead)
        return masks

    def _follow(self, output_token_ids: Sequence[int]) -> None:
        new = list(output_token_ids[self._num_followed :])
        self._num_followed = len(output_token_ids)
        if new and self.error is None and self._matcher.try_consume_tokens(new) != len(new) and not self._check():
            self.error = "a token that its grammar does not allow is in the text"

    def _check(self) -> bool:
        if self.error is None and self._matcher.is_error():
            self.error = self._matcher.get_error().strip().splitlines()[0]
        return self.error is not None


class GrammarCompiler:
    """Makes states of requests' grammars; keeps the latest grammars compiled. Reads the tokenizer when first asked.

    Args:
        tokenizer: of the model, which may have more tokens, if only such as no text is made of; `vocab_size` logits,
            padding included, of which `eos_token_ids` end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._given = tokenizer
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        ends, size = sorted(self._eos_token_ids), max(self._vocab_size, self._given.get_vocab_size())
        return LLTokenizer(self._given.to_str(), n_vocab=size, eos_token=ends)

    @cached_property
    def _special(self) -> dict[str, int]:
        """Added tokens that look like a tag: never text to llguidance, whether or not the tokenizer says so."""
        added = self._given.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if self._tokenizer.is_special_token(i)}

    def compile(self, wanted: StructuredOutputs) -> LLMatcher:
        """A matcher at the start of the text, not to be moved. Raises ValueError that names the field."""
        key = msgspec.json.encode(wanted)
        if key not in self._compiled:
            self._compiled[key] = self.make(wanted)
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def make(self, wanted: StructuredOutputs) -> LLMatcher:
        """The same, always anew."""
        try:
            matcher = LLMatcher(self._tokenizer, self._source(wanted), log_level=0)
            first = matcher.deep_copy()
            first.compute_bitmask()  # some grammars are found to be none, or too much, only when they are begun
            error = first.get_error().partition("\n<state>")[0] if first.is_error() else ""
        except (ValueError, RecursionError) as raised:
            error = str(raised)
        if error:
            raise ValueError(f"{wanted.field}: the grammar cannot be used: {' '.join(error.split())[:500]}")
        return matcher

    def start(self, wanted: StructuredOutputs) -> GrammarState:
        return GrammarState(self.compile(wanted).deep_copy(), self._vocab_size, self._eos_token_ids)

    def _source(self, wanted: StructuredOutputs) -> str:
        body = body_grammar(wanted)
        if wanted.reasoning is None and wanted.calls is None:
            return json.dumps({"grammars": [body]})
        parts = [{"name": "body", **body}]
        rest = "@body"
        if wanted.calls is not None:
            parts.append({"name": "calls", "lark_grammar": wanted.calls})
            rest = "(@body | @calls)"
        close, is_special = self._tag(_CLOSE_TAG)
        tail = f"think_tail: TEXT {close}" if is_special else f"think_tail[lazy]: TEXT {close}"
        opened = self._tag(_OPEN_TAG)[0]
        begin = {None: "", "inside": "think", "before": f"({opened} think)?"}[wanted.reasoning]
        main = f"%llguidance {{}}\nstart: {begin} {rest}\n"
        if begin:
            main += f"think: think_tail SPACE?\n{tail}\nTEXT: /(.|\\n)*/\nSPACE: /[ \\n]{{1,4}}/\n"
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": main}, *parts]})

    def _tag(self, text: str) -> tuple[str, bool]:
        """A tag in Lark's writing, and whether it is one token, which no text can be."""
        return (f"<[{self._special[text]}]>", True) if text in self._special else (json.dumps(text), False)


def body_grammar(wanted: StructuredOutputs) -> dict[str, Any]:
    """One grammar of llguidance's, out of whichever form was given."""
    if wanted.json_object:
        return {"json_schema": {"type": "object", "x-guidance": _JSON_OPTIONS}}
    if wanted.json is not None:
        schema = json.loads(wanted.json) if isinstance(wanted.json, str) else wanted.json
        if isinstance(schema, dict):
            return {"json_schema": {"x-guidance": _JSON_OPTIONS, **schema}}
        return {"json_schema": schema}
    if wanted.regex is not None:
        return {"lark_grammar": json.loads(LLMatcher.grammar_from_regex(wanted.regex))["grammars"][0]["lark_grammar"]}
    if wanted.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}  # one terminal: it may have many thousands
    try:
        return {"lark_grammar": any_to_lark(wanted.grammar or "")}
    except Exception as error:  # it reports wrong GBNF in many ways
        raise ValueError(f"neither Lark nor GBNF: {error}") from error
