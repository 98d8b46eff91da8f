"""Structured output and forced tool calls on a live server with the model that ships, by the openai client."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_process import ServerProcess, call

from mambalign.engine.checkpoint import DEFAULT_MODEL

pytestmark = pytest.mark.skipif(not (DEFAULT_MODEL / "config.json").exists(), reason="no model ships here")

TEMPLATE = (  # teaches Hermes' form of calls; the model does not learn it, its grammar does
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}# {{ m.content }}{{ '\\n' }}"
    "{% endfor %}{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}, "ok": {"type": "boolean"}},
    "required": ["name", "size", "ok"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "save", "parameters": SCHEMA, "strict": True}},
         {"type": "function", "function": {"name": "stop"}}]  # fmt: skip
WRONG_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "no"}}}}}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
ASK = {"model": "default", "messages": [{"role": "user", "content": "a file"}], "max_tokens": 200}


@pytest.fixture(scope="module", params=[("v1", "0"), ("v2", "3")], ids=str)
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    runner, drafts = request.param
    options = ("--max-model-len", "1024", "--cache-memory", "64MiB", "--chat-template", TEMPLATE)
    with ServerProcess(*options, "--runner", runner, "--spec-tokens", drafts) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def check(value: Any) -> None:
    assert set(value) == {"name", "size", "ok"} and value["size"] in (1, 2, 3) and isinstance(value["ok"], bool)
    assert len(value["name"]) <= 8


@pytest.mark.parametrize("how", [{"temperature": 0}, {"seed": 3, "temperature": 1.0}, {"seed": 4, "n": 3}], ids=str)
def test_json(client: openai.OpenAI, how: dict) -> None:
    fields = {**ASK, **how, "response_format": JSON_FORMAT}
    answer = client.chat.completions.create(**fields)
    texts = [choice.message.content for choice in answer.choices]
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check(json.loads(choice.message.content))
    streamed = ["" for _ in texts]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_responses_follow_formats_and_call_tools(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "default", "input": "a file", "max_output_tokens": 200, "temperature": 0}
    wanted = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    answer = client.responses.create(**fields, text=wanted)
    assert answer.status == "completed"
    check(json.loads(answer.output_text))
    with client.responses.stream(**fields, text=wanted) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == answer.output_text
    tools = [{"type": "function", "name": "save", "parameters": SCHEMA, "strict": True}]
    called = client.responses.create(**fields, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call_item,) = (item for item in called.output if item.type == "function_call")
    assert call_item.name == "save"
    check(json.loads(call_item.arguments))


def test_json_object_and_the_other_forms(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, response_format={"type": "json_object"}, temperature=0)
    text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text.startswith("{") and (reason == "length" or isinstance(json.loads(text), dict))
    for form, pattern in [
        ({"regex": "def [a-z]{3,9}"}, "def [a-z]{3,9}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "<" /[a-c]{2}/ ">"'}, "<[a-c]{2}>"),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 12}}, "1[0-2]"),
    ]:
        for _ in range(2):
            answer = client.completions.create(
                model="default", prompt="x = ", max_tokens=50, extra_body={"structured_outputs": form}
            )
            assert re.fullmatch(pattern, answer.choices[0].text), answer
            assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "save"}}], ids=str)
def test_a_call_that_must_come(client: openai.OpenAI, choice: Any) -> None:
    fields = {**ASK, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
    (whole,) = client.chat.completions.create(**fields).choices
    (made,) = whole.message.tool_calls
    assert whole.message.content is None and whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert made.function.name == "save" or choice == "required"
    if made.function.name == "save":
        check(json.loads(made.function.arguments))
    name, arguments = None, ""
    for chunk in client.chat.completions.create(**fields, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            name = part.function.name or name
            arguments += part.function.arguments
    assert (name, arguments) == (made.function.name, made.function.arguments)


def test_a_format_or_a_call(client: openai.OpenAI) -> None:
    fields = {**ASK, "tools": TOOLS, "response_format": JSON_FORMAT, "parallel_tool_calls": False, "n": 8, "seed": 2}
    answer = client.chat.completions.create(**fields)
    kinds = set()
    for choice in answer.choices:
        calls = choice.message.tool_calls
        kinds.add(choice.finish_reason)
        if calls is None:
            check(json.loads(choice.message.content))
        elif calls[0].function.name == "save":
            check(json.loads(calls[0].function.arguments))
    assert kinds <= {"stop", "tool_calls"}


def test_reasoning_comes_before_the_grammar(client: openai.OpenAI) -> None:
    fields = {**ASK, "temperature": 0, "max_tokens": 300, "response_format": JSON_FORMAT}
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    (free,) = client.chat.completions.create(**{**fields, "max_tokens": 8}, extra_body=extra).choices
    assert free.message.reasoning_content and not free.message.content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"reasoning": "inside", "regex": "a"}}, "structured_outputs.reasoning"),
        ({"structured_outputs": {"regex": "a"}, "response_format": JSON_FORMAT}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
        ({"response_format": JSON_FORMAT, "tools": TOOLS, "tool_choice": "required"}, "response_format"),
        ({"tools": [*TOOLS, WRONG_TOOL], "tool_choice": "required"}, "tools[2].function.parameters"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_refused_at_once(
    server: ServerProcess, fields: dict, param: str, stream: bool
) -> None:
    status, answer = call(f"{server.url}/v1/chat/completions", {**ASK, **fields, "stream": stream})
    assert status == 400 and answer["error"]["param"] == param and param in answer["error"]["message"], answer
