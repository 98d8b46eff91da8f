"""Replies with tool calls under a grammar: whatever is drawn from its masks is read as calls that fit the schemas."""

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mambalign.engine.server.assistant_text import TOOL_PARSERS, AssistantText
from mambalign.engine.server.chat_tools import Function, Tool, check_tools
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.tool_grammar import tool_grammar
from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.sampling_params import StructuredOutputs

EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", 'F"']},
        "days": {"$ref": "#/$defs/days"},
        "exact": {"type": ["boolean", "null"]},
    },
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [Tool(Function("get.weather", parameters=SCHEMA)), Tool(Function("stop"))]


def make_tokenizer(tags: tuple[str, ...]) -> Tokenizer:
    words = ["</s>", *tags, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in tags])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Grammar:
    def __init__(self, name: str, tags_are_tokens: bool, must_call: bool, parallel: bool):
        self.parser = TOOL_PARSERS[name]
        self.tokenizer = make_tokenizer(self.parser.tags if tags_are_tokens else ())
        vocab = self.tokenizer.get_vocab()
        token_ids = {tag: vocab[tag] for tag in self.parser.tags if tags_are_tokens}
        lark = tool_grammar(self.parser, TOOLS, must_call=must_call, parallel=parallel, token_ids=token_ids)
        self.compiler = GrammarCompiler(self.tokenizer, len(vocab), [EOS])
        self.wanted = StructuredOutputs(grammar=lark, field="tools")

    def allows(self, text: str) -> bool:
        ids = self.tokenizer.encode(text).ids
        masks = self.compiler.start(self.wanted).masks([], ids)
        return all(m is not None for m in masks) and bool(masks[-1][0] & 1 << EOS)

    def draw(self, seed: int) -> str:
        state, ids, rng = self.compiler.start(self.wanted), [], random.Random(seed)
        while True:
            (mask,) = state.masks(ids, [])
            allowed = np.nonzero(np.unpackbits(mask, bitorder="little"))[0].tolist()
            assert allowed and state.error is None
            if allowed == [EOS] or (EOS in allowed and (len(ids) > 300 or rng.random() < 0.3)):
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            ids.append(rng.choice([i for i in allowed if i != EOS]))

    def read(self, text: str) -> tuple[str, list[tuple[str, Any]]]:
        reader = AssistantText(self.parser, {tool.function.name: tool.schema for tool in TOOLS}, None)
        said = reader.read(text)
        said.add(reader.finish())
        return said.content, [(call.name, json.loads(call.arguments)) for call in said.calls]


def fits(name: str, arguments: dict) -> bool:
    if name == "stop":
        return True
    days, exact = arguments.get("days", 1), arguments.get("exact", None)
    names_fit = name == "get.weather" and set(arguments) <= set(SCHEMA["properties"])
    return names_fit and arguments["unit"] in ("C", 'F"') and days in range(1, 10) and exact in (True, False, None)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("tags_are_tokens", [True, False])
@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_required_call_is_one(name: str, tags_are_tokens: bool, parallel: bool) -> None:
    grammar = Grammar(name, tags_are_tokens, must_call=True, parallel=parallel)
    counts = set()
    for seed in range(12):
        content, calls = grammar.read(grammar.draw(seed))
        counts.add(len(calls))
        assert content == "" and calls and all(fits(*call) for call in calls)
    assert parallel == (max(counts) > 1) and min(counts) == 1
    assert not grammar.allows("") and not grammar.allows("no call")


WEATHER = {
    "hermes": '<tool_call>\n{"name": "get.weather", "arguments": {"unit": "C"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get.weather>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
    "nemotron_json": '<TOOLCALL>[{"name": "get.weather", "arguments": {"unit": "C"}}]</TOOLCALL>',
}


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("tags_are_tokens", [True, False])
@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_call_that_may_come_must_fit(name: str, tags_are_tokens: bool, parallel: bool) -> None:
    grammar = Grammar(name, tags_are_tokens, must_call=False, parallel=parallel)
    call, opened = WEATHER[name], TOOL_PARSERS[name].open_tags[0]
    for text in ("", "no call <at> all\n", call, "First.\n" + call, call + "\nDone.\n"):
        assert grammar.allows(text), text
    assert grammar.allows(call + "\n" + call) == parallel
    for text in (
        opened,
        f"{opened} no call",
        call.replace("unit", "size"),
        "So: " + call.replace('"C"', '"K"').replace("\nC", "\nK"),
    ):
        assert not grammar.allows(text), text
    assert grammar.read("First.\n" + call) == ("First.", [("get.weather", {"unit": "C"})])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["string", "object", "integer", "a", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["type", "enum", "const", "anyOf", "properties", "required", "$ref", "a", "b>", "items", "pattern"]
    ), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip
COMPILERS = {name: GrammarCompiler(make_tokenizer(()), 257, [EOS]) for name in TOOL_PARSERS}


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["type", "properties", "required", "$defs", "anyOf"]), VALUES, max_size=4),
    st.sampled_from(list(TOOL_PARSERS)),
    st.booleans(),
    st.text('<>/=tolca_parmefunsi{}:" \n', max_size=60),
)
def test_no_schema_breaks_it(schema: dict, name: str, must_call: bool, text: str) -> None:
    """A schema is followed, or refused in words."""
    tool, parser = Tool(Function("f", parameters=schema)), TOOL_PARSERS[name]
    try:
        check_tools([tool], None)
        lark = tool_grammar(parser, [tool], must_call=must_call, parallel=True, token_ids={})
        COMPILERS[name].compile(StructuredOutputs(grammar=lark, field="tools"))
    except (ApiError, ValueError):
        pass
    else:
        reader = AssistantText(parser, {"f": tool.schema}, None)
        for value in ("a", "5", "null", text):
            reader.read(f"<tool_call><function=f><parameter=a>{value}</parameter><parameter=b>{text}")
        reader.finish()
