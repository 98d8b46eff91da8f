"""Chats with tools, reasoning and templates, over HTTP with the openai client; the replies come from the fake core."""

import json
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
    "{% endfor %}{% if not (loop.last and not add_generation_prompt) %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "g"}},
]
CALLS = 'So.\n<tool_call>\n{"name": "f", "arguments": {"a": "é<"}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'


@pytest.fixture(scope="module", params=[0, 3, 7])
def url(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_checkpoint(folder, chat_template=TEMPLATE, max_len=2048, special=("<tool_call>", "</tool_call>"))
    with ServerProcess(folder, "--spec-tokens", str(request.param), program="fake_core.py") as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": SAY[0] + text + SAY[1]}]


def streamed(client: openai.OpenAI, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream, joined to what a whole answer says of them."""
    joined: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(model="tiny", stream=True, **fields):
        for choice in chunk.choices:
            one = joined.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "reason": None})
            delta = choice.delta
            one["content"] += delta.content or ""
            one["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or []:
                if part.id is not None:
                    assert part.index == len(one["calls"]) and part.type == "function"
                    one["calls"].append([part.function.name, ""])
                one["calls"][part.index][1] += part.function.arguments
            assert one["reason"] is None
            one["reason"] = choice.finish_reason
    return [joined[i] for i in sorted(joined)]


def whole(client: openai.OpenAI, **fields: Any) -> list[dict[str, Any]]:
    choices = client.chat.completions.create(model="tiny", **fields).choices
    return [
        {
            "content": c.message.content or "",
            "reasoning": getattr(c.message, "reasoning_content", None) or "",
            "calls": [[t.function.name, t.function.arguments] for t in c.message.tool_calls or []],
            "reason": c.finish_reason,
        }
        for c in choices
    ]


@pytest.mark.parametrize(
    ("text", "fields", "wanted"),
    [
        (CALLS, {"tools": TOOLS}, ("So.", "", [["f", '{"a": "é<"}'], ["g", "{}"]], "tool_calls")),
        (CALLS, {"tools": TOOLS, "n": 2}, ("So.", "", [["f", '{"a": "é<"}'], ["g", "{}"]], "tool_calls")),
        ("no call", {"tools": TOOLS}, ("no call", "", [], "stop")),
        (CALLS, {"tools": TOOLS, "max_tokens": 20}, ("So.", "", [["f", ""]], "length")),
        ("<think>a\nb</think>\n\n" + CALLS, {"tools": TOOLS, "tool_choice": "auto"},
         ("So.", "a\nb", [["f", '{"a": "é<"}'], ["g", "{}"]], "tool_calls")),
        ("a</think>b", {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, ("b", "a", [], "stop")),
        ("a</think>b", {"reasoning_effort": "none"}, ("a</think>b", "", [], "stop")),
        ("a<think>b", {}, ("a<think>b", "", [], "stop")),
    ],
)  # fmt: skip
def test_a_stream_joins_to_the_whole(client: openai.OpenAI, text: str, fields: dict, wanted: tuple) -> None:
    fields = {"messages": say(text), **fields}
    results = whole(client, **fields)
    assert [tuple(result.values()) for result in results] == [wanted] * fields.get("n", 1)
    assert streamed(client, **fields) == results


def test_the_model_is_not_told_of_tools_it_must_not_call(url: str, client: openai.OpenAI) -> None:
    message = say("x")
    plain = client.chat.completions.create(model="tiny", messages=message).usage.prompt_tokens
    none = client.chat.completions.create(model="tiny", messages=message, tools=TOOLS, tool_choice="none")
    auto = client.chat.completions.create(model="tiny", messages=message, tools=TOOLS)
    assert none.usage.prompt_tokens == plain < auto.usage.prompt_tokens


def rendered(url: str, **body: Any) -> str:
    status, answer = call(f"{url}/tokenize", body)
    assert status == 200, answer
    ids = answer["tokens"]
    return call(f"{url}/detokenize", {"tokens": ids})[1]["prompt"]


def test_what_the_template_gets(url: str) -> None:
    arguments = json.dumps({"x": 5})
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None,
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]  # fmt: skip
    history = "[user]ab\n[assistant]<think>hm</think><tool_call>f 5</tool_call>\n[tool]7"
    assert rendered(url, messages=messages) == history + "\n[assistant]"
    assert rendered(url, messages=messages, add_generation_prompt=False) == history
    thinking = rendered(url, messages=messages, chat_template_kwargs={"enable_thinking": True})
    assert thinking == history + "\n[assistant]<think>\n"
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I say"}]
    assert rendered(url, messages=turn, continue_final_message=True) == "[user]a\n[assistant]I say"
    with_tools = rendered(url, messages=turn, tools=TOOLS[1:])
    assert json.loads(with_tools.splitlines()[0])[0]["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f",
          "arguments": "{"}}]}]}, "messages[0].tool_calls[0].function.arguments"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS + TOOLS}, "tools[2].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]},
         "tools[0].function.parameters.properties"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template_kwargs": {"thinking_budget": 5}}, "chat_template_kwargs.thinking_budget"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(url: str, fields: dict, param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    status, answer = call(f"{url}/v1/chat/completions", body)
    assert status == 400 and answer["error"]["param"] == param and param in answer["error"]["message"], answer


def test_a_template_of_ones_own(fake_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("<{{ messages[0].content }}>")
    options = ("--chat-template", file, "--reasoning-parser", "think", "--tool-call-parser", "hermes")
    with ServerProcess(fake_model, *options, program="fake_core.py") as server:
        assert rendered(server.url, messages=[{"role": "user", "content": "hi"}]) == "<hi>"
        body = {"messages": say("<think>a</think>b"), "tools": []}
        message = call(f"{server.url}/v1/chat/completions", body)[1]["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "b", "reasoning_content": "a"}
    for option, text in [("no/such/file", "cannot be read"), ("{% for %}", "the chat template cannot be read: line 1")]:
        with ServerProcess(fake_model, "--chat-template", option, program="fake_core.py") as server:
            assert server.wait_exit() == 2 and text in server.output
