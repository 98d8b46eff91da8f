"""Reasoning, messages and function calls as items of /v1/responses, by the openai client; the fake core says them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_core import SAY, make_checkpoint
from server_process import ServerProcess, call

TEMPLATE = (
    "{% if tools %}{{ tools | tojson + '\\n' }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments.x }}</tool_call>"
    "{% endfor %}{{ '\\n' }}{% endfor %}[assistant]{% if reasoning_effort == 'high' %}<think>{% endif %}"
)
F = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
G = {"type": "function", "name": "g", "parameters": None, "strict": None, "description": "does g"}
CALL_F = '<tool_call>{"name": "f", "arguments": {"a": "é<"}}</tool_call>'
CALL_G = '<tool_call>{"name": "g"}</tool_call>'
HIGH = {"reasoning": {"effort": "high"}}
Wanted = list[tuple[str, ...]]


@pytest.fixture(scope="module", params=[0, 1, 3, 7])
def url(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_checkpoint(folder, chat_template=TEMPLATE, max_len=2048)
    with ServerProcess(folder, "--spec-tokens", str(request.param), program="fake_core.py") as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def said(item: Any) -> tuple[str, ...]:
    if item.type == "function_call":
        return ("call", item.name, item.arguments)
    (part,) = item.content
    return (item.type, part.text)


CASES: list[tuple[str, dict[str, Any], Wanted]] = [
    ("hi", {}, [("message", "hi")]),
    ("", {}, [("message", "")]),
    (CALL_F, {"tools": [F, G]}, [("call", "f", '{"a": "é<"}')]),
    (f"So.\n{CALL_F}\n{CALL_G} ok", {"tools": [F, G]},
     [("message", "So."), ("call", "f", '{"a": "é<"}'), ("call", "g", "{}"), ("message", " ok")]),
    (f"<think>a\nb</think>\n\nSo.{CALL_G}", {"tools": [G], "tool_choice": "required"},
     [("reasoning", "a\nb"), ("message", "So."), ("call", "g", "{}")]),
    ("hm</think>b", HIGH, [("reasoning", "hm"), ("message", "b")]),
    ("hm", HIGH, [("reasoning", "hm")]),
    (CALL_G, {"tools": [G], "tool_choice": "none"}, [("message", CALL_G)]),
    ("<tool_call>no", {"tools": [G]}, [("message", "<tool_call>no")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fields", "wanted"), CASES)
def test_a_stream_joins_to_the_whole(client: openai.OpenAI, text: str, fields: dict, wanted: Wanted) -> None:
    fields = {"model": "tiny", "input": SAY[0] + text + SAY[1], **fields}
    whole = client.responses.create(**fields)
    assert [said(item) for item in whole.output] == wanted and whole.status == "completed"
    assert {item.status for item in whole.output} == {"completed"}
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert [said(item) for item in events[-1].response.output] == wanted
    assert events[-1].response.usage.output_tokens_details == whole.usage.output_tokens_details
    check_items(events[2:-1], events[-1].response.output)


def check_items(events: list[Any], items: list[Any]) -> None:
    """One item after the other: its beginning, what it brings, its end; the pieces join to the item."""
    rest = iter(events)
    for index, item in enumerate(items):
        kind = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
        part = [] if item.type == "function_call" else ["content_part"]
        added = next(rest)
        assert (added.type, added.item.id, added.item.status) == ("response.output_item.added", item.id, "in_progress")
        seen, deltas = [], []
        for event in rest:
            assert event.output_index == index
            if event.type == "response.output_item.done":
                assert event.item == item
                break
            assert event.item_id == item.id
            if event.type == f"response.{kind[item.type]}.delta":
                deltas.append(event.delta)
            else:
                seen.append(event.type)
            if event.type == f"response.{kind[item.type]}.done":
                assert "".join(deltas) == said(item)[-1] == (event.arguments if not part else event.text)
        wanted = [*(f"{p}.added" for p in part), f"{kind[item.type]}.done", *(f"{p}.done" for p in part)]
        assert seen == [f"response.{name}" for name in wanted]
    assert not list(rest)


def test_the_client_s_stream_helper(client: openai.OpenAI) -> None:
    asked = SAY[0] + f"<think>hm</think>So.{CALL_F}{CALL_G}" + SAY[1]
    with client.responses.stream(model="tiny", input=asked, tools=[F, G]) as stream:
        arguments = ""
        for event in stream:
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
                assert event.snapshot == arguments or event.delta == "{}"
        final = stream.get_final_response()
    assert [said(item) for item in final.output] == [
        ("reasoning", "hm"), ("message", "So."), ("call", "f", '{"a": "é<"}'), ("call", "g", "{}")]  # fmt: skip
    assert final.output_text == "So."


@pytest.mark.parametrize("length", range(1, 50, 4))
def test_cut_anywhere(client: openai.OpenAI, length: int) -> None:
    asked = SAY[0] + "<think>hé</think>So." + CALL_F + SAY[1]
    fields = {"model": "tiny", "input": asked, "tools": [F], "max_output_tokens": length}
    whole = client.responses.create(**fields)
    *events, last = client.responses.create(**fields, stream=True)
    assert whole.status == last.response.status == "incomplete" and last.type == "response.incomplete"
    assert [said(item) for item in last.response.output] == [said(item) for item in whole.output]
    assert [item.status for item in whole.output] == ["completed"] * (len(whole.output) - 1) + ["incomplete"]
    check_items(events[2:], last.response.output)
    num_reasoning = min(length, len("<think>hé</think>".encode())) if length >= len("<think>") else 0
    assert whole.usage.output_tokens_details.reasoning_tokens == num_reasoning
    assert last.response.usage.output_tokens_details == whole.usage.output_tokens_details
    assert last.response.usage.output_tokens == whole.usage.output_tokens == length
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": asked}], max_tokens=length
    )
    assert chat.usage.completion_tokens_details.reasoning_tokens == num_reasoning


def test_a_conversation_with_calls_goes_back(client: openai.OpenAI) -> None:
    asked = SAY[0] + '<think>hm</think>So.<tool_call>{"name": "f", "arguments": {"x": 5}}</tool_call>' + SAY[1]
    first = client.responses.create(model="tiny", input=asked, tools=[F, G])
    turns = [
        {"role": "user", "content": "q"},
        *[item.model_dump() for item in first.output],
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "7"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "8"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "alone"}]},
        {"role": "user", "content": "more"},
    ]
    rendered = (
        "[user]q\n[assistant]<think>hm</think>So.<tool_call>f 5</tool_call><tool_call>g </tool_call>\n"
        "[tool]7\n[tool]8\n[assistant]<think>alone</think>\n[user]more\n[assistant]"
    )
    again = client.responses.create(model="tiny", input=turns, max_output_tokens=len(rendered), tools=[])
    assert again.usage.input_tokens == len(rendered) and again.output_text == rendered


def test_what_was_asked_comes_back(url: str, client: openai.OpenAI) -> None:
    fields = {"input": "x", "max_output_tokens": 3, "tools": [F, G], "parallel_tool_calls": False,
              "tool_choice": {"type": "function", "name": "g"}}  # fmt: skip
    status, answer = call(f"{url}/v1/responses", fields)
    assert status == 200, answer
    assert [tool["strict"] for tool in answer["tools"]] == [False, True]
    assert answer["tools"][1].items() >= {"type": "function", "name": "g", "description": "does g"}.items()
    assert answer["tool_choice"] == fields["tool_choice"] and answer["parallel_tool_calls"] is False
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    answer = client.responses.create(
        model="tiny", input="x", max_output_tokens=3, text={"format": schema}, reasoning={"effort": "high"}
    )
    assert answer.text.format.type == "json_schema" and answer.text.format.schema_ == {"type": "object"}
    assert answer.reasoning.effort == "high" and answer.tool_choice == "auto" and answer.tools == []


def test_logprobs_need_a_reply_that_is_all_text(url: str) -> None:
    fields = {"input": "x", "include": ["message.output_text.logprobs"]}
    status, answer = call(f"{url}/v1/responses", fields)
    assert (status, answer["error"]["param"]) == (400, "include")
