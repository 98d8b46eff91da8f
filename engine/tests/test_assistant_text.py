"""Reasoning and tool calls out of a model's text: what each format means, and that no cut of the text shows."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mambalign.engine.server.assistant_delta import AssistantDelta
from mambalign.engine.server.assistant_text import TOOL_PARSERS, AssistantText, find_tool_parser

SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "unit": {"enum": ["C", "F"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "where": {"$ref": "#/$defs/place"},
            "ratio": {"type": "number"},
        },
    }
}


def read(text: str, parser: str | None = None, reasoning: str | None = None, cuts: list[int] | None = None):
    reader = AssistantText(TOOL_PARSERS[parser] if parser else None, SCHEMAS, reasoning)
    whole = AssistantDelta()
    ends = [*sorted(cuts or []), len(text)]
    start = 0
    for end in ends:
        whole.add(reader.read(text[start:end]))
        start = end
    whole.add(reader.finish())
    assert [call.index for call in whole.calls] == list(range(reader.num_calls))
    return whole


def calls(delta: AssistantDelta) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in delta.calls]


HERMES = [
    ('<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>', "", [("f", '{"a": [1, "}"]}')]),
    ('Wait.\n<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n', "Wait.", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g", "arguments": null}</tool_call>', "",
     [("f", "{}"), ("g", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"id": 7, "name": "f", "parameters": {"a": "</tool_call>\\""}}</tool_call> more', "more",
     [("f", '{"a": "</tool_call>\\""}')]),
    ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>', "",
     [("f", "{}"), ("g", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}} and so on</tool_call> end', "end", [("f", "{}")]),
    ("a <tool_call>no JSON</tool_call> b", "a <tool_call>no JSON</tool_call> b", []),
    ('<tool_call>{"arguments": {"a": 1}}</tool_call>', '<tool_call>{"arguments": {"a": 1}}</tool_call>', []),
    ('<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
    ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ('<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
    ("if a <tool_cal b  ", "if a <tool_cal b  ", []),
    ("<<tool_call>", "<<tool_call>", []),
]  # fmt: skip
XML = [
    ("<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
     "</function>\n</tool_call>", "", [("weather", '{"city": "Paris", "days": 3}')]),
    ("Yes.\n\n<tool_call><function=f></function></tool_call>\n", "Yes.", [("f", "{}")]),
    ('<tool_call>\n<function=weather>\n<parameter=city>\n\n"a"\n\tb\n\n</parameter>\n</function>\n</tool_call>', "",
     [("weather", json.dumps({"city": '\n"a"\n\tb\n'}))]),
    ("<function=weather><parameter=exact>True</parameter></function> <function=f></function>\nok", "ok",
     [("weather", '{"exact": true}'), ("f", "{}")]),
    ("<function=f></function></tool_call>", "", [("f", "{}")]),
    ("<tool_call><function=weather><parameter=days>many</parameter><parameter=other>5</parameter></function>"
     "</tool_call>", "", [("weather", '{"days": "many", "other": "5"}')]),
    ("<tool_call><function=weather><parameter=note>None</parameter><parameter=unit>C</parameter>"
     '<parameter=where>{"x":[1,2]}</parameter><parameter=ratio>2</parameter></function></tool_call>', "",
     [("weather", '{"note": null, "unit": "C", "where": {"x": [1, 2]}, "ratio": 2}')]),
    ("<tool_call>\n<function=weather>\n<parameter=city>\nPar", "", [("weather", '{"city": "Par')]),
    ("So: <function=f></function>\nok", "So:\nok", [("f", "{}")]),
    ("<tool_call> no <function=f></function></tool_call>", "<tool_call> no", [("f", "{}")]),
    ("<function=a<b", "<function=a<b", []),
    ("é<tool_call></tool_call>ü", "é<tool_call></tool_call>ü", []),
]  # fmt: skip
NEMOTRON = [
    ('<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>', "",
     [("f", '{"a": 1}'), ("g", "{}")]),
    ("<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", []),
]  # fmt: skip
CASES = [(n, *case) for n, cases in (("hermes", HERMES), ("qwen3_coder", XML), ("nemotron_json", NEMOTRON))
         for case in cases]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "content", "wanted"), CASES)
def test_tool_calls_at_every_cut(parser: str, text: str, content: str, wanted: list) -> None:
    whole = read(text, parser)
    assert (whole.content, calls(whole)) == (content, wanted)
    for cut in range(len(text)):
        assert read(text, parser, cuts=[cut]) == whole
    for width in range(1, 9):
        assert read(text, parser, cuts=list(range(width, len(text), width))) == whole


PIECES = st.sampled_from(
    [*"<>{}[]\"\\,: \n", "<tool_call>", "</tool_call>", "<function=weather>", "<parameter=city>", "<parameter=days>",
     "</parameter>", "</function>", "<TOOLCALL>", "</TOOLCALL>", '{"name": "f", "arguments": {', '"name"',
     "<think>", "</think>", "word", "é", "12", "null"]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.lists(PIECES, max_size=30).map("".join),
    st.sampled_from([None, *TOOL_PARSERS]),
    st.sampled_from([None, "inside", "before", "behind"]),
    st.data(),
)
def test_no_cut_shows(text: str, parser: str | None, reasoning: str | None, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    whole = read(text, parser, reasoning)
    assert read(text, parser, reasoning, cuts) == whole
    assert read(text, parser, reasoning, list(range(len(text)))) == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=4)), min_size=1, max_size=3),
       st.sampled_from(["hermes", "nemotron_json"]), st.booleans())  # fmt: skip
def test_any_json_arguments_come_back(wanted: list, parser: str, escapes: bool) -> None:
    objects = [json.dumps({"name": n, "arguments": a}, ensure_ascii=escapes) for n, a in wanted]
    opened, closed = TOOL_PARSERS[parser].tags
    one_block = f"{opened}[{', '.join(objects)}]{closed}"
    many_blocks = "\n".join(f"{opened}\n{text}\n{closed}" for text in objects)
    for text in (one_block, many_blocks):
        result = read(text, parser)
        assert [(c.name, json.loads(c.arguments)) for c in result.calls] == wanted and result.content == ""


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(), st.booleans())
def test_any_xml_arguments_come_back(city: str, days: int, exact: bool) -> None:
    values = {"city": city.replace("</parameter>", ""), "days": days, "exact": exact}
    parts = [f"<parameter={k}>\n{v if k == 'city' else json.dumps(v)}\n</parameter>\n" for k, v in values.items()]
    result = read(f"<tool_call>\n<function=weather>\n{''.join(parts)}</function>\n</tool_call>", "qwen3_coder")
    assert [(c.name, json.loads(c.arguments)) for c in result.calls] == [("weather", values)]


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        ("inside", "\nhm, 1 < 2\n</think>\n\nTwo.", "hm, 1 < 2", "Two."),
        ("inside", "not done \n", "not done \n", ""),
        ("inside", "</think>Hi", "", "Hi"),
        ("before", "\n<think>\na\n\nb</think> c </think>", "a\n\nb", "c </think>"),
        ("before", "<thin", "", "<thin"),
        ("before", " plain <think>", "", " plain <think>"),
        ("behind", "<think>x</think>", "", "<think>x</think>"),
        (None, "<think>x</think>", "", "<think>x</think>"),
    ],
)
def test_reasoning(start: str | None, text: str, reasoning: str, content: str) -> None:
    for width in range(1, 9):
        result = read(text, None, start, list(range(width, len(text), width)))
        assert (result.reasoning, result.content) == (reasoning, content)


def test_reasoning_then_calls() -> None:
    text = 'I call <tool_call> now</think>\nOK\n<tool_call>{"name": "f"}</tool_call>'
    result = read(text, "hermes", "inside")
    assert (result.reasoning, result.content, calls(result)) == ("I call <tool_call> now", "OK", [("f", "{}")])


def test_the_template_names_the_parser() -> None:
    assert find_tool_parser("... <tool_call>\n<function=example> ...") == "qwen3_coder"
    assert find_tool_parser("... <tool_call>\n{...} ...") == "hermes"
    assert find_tool_parser("<TOOLCALL>[") == "nemotron_json" and find_tool_parser("plain") is None
