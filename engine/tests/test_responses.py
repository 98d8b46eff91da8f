"""/v1/responses over HTTP with the openai client; the fake core answers with the rendered conversation."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess, call

RENDERED = "[system]be brief\n[user]naïve €\n[assistant]"
FIELDS = {"model": "tiny", "instructions": "be brief", "input": "naïve €"}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.fixture(scope="module", params=[0, 3, 7])
def url(fake_model: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    with ServerProcess(fake_model, "--spec-tokens", str(request.param), program="fake_core.py") as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_whole(client: openai.OpenAI) -> None:
    answer = client.responses.create(**FIELDS, max_output_tokens=30, metadata={"a": "b"}, user="me", temperature=0.5)
    num_characters = len(RENDERED.encode()[:30].decode())
    assert answer.output_text == RENDERED[:num_characters] and answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.output[0].status == "incomplete"
    assert (answer.metadata, answer.user, answer.temperature, answer.store) == ({"a": "b"}, "me", 0.5, False)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(RENDERED.encode()), 30)
    again = client.responses.create(**FIELDS, extra_body={"stop": "€"})
    assert again.status == "completed" and again.output_text == RENDERED[: RENDERED.index("€")]
    assert again.usage.input_tokens_details.cached_tokens == len(RENDERED.encode()) - 1
    assert again.incomplete_details is None and again.completed_at >= again.created_at - 1


@pytest.mark.parametrize("length", [1, 29, 30, 31, 45])
@pytest.mark.parametrize("extra", [{}, LOGPROBS], ids=["plain", "logprobs"])
def test_stream_joins_to_the_whole(client: openai.OpenAI, length: int, extra: dict) -> None:
    fields = FIELDS | {"max_output_tokens": length} | extra
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.incomplete"]  # fmt: skip
    deltas = events[4:-4]
    assert {e.type for e in deltas} <= {"response.output_text.delta"}
    assert "".join(e.delta for e in deltas) == whole.output_text == events[-4].text
    part, final = whole.output[0].content[0], events[-1].response
    assert final.output_text == whole.output_text and final.usage.output_tokens == length
    logprobs = [entry for e in deltas for entry in e.logprobs]
    assert [(p.token, p.logprob) for p in logprobs] == [(p.token, p.logprob) for p in part.logprobs]
    assert len(logprobs) == (length if extra else 0)
    assert {e.item_id for e in [*deltas, *events[-4:-2]]} == {events[2].item.id} == {final.output[0].id}


def test_conversations_and_answers_sent_back(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="hi", max_output_tokens=8)
    turns = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "more", "type": "message"},
    ]
    answer = client.responses.create(model="tiny", input=turns)
    assert answer.output_text.startswith("[system]d\n[user]hi\n[assistant][user]hi\n[user]more\n[assistant]")


def test_the_client_s_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="hi", extra_body={"stop": "hi"}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == "[user]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "x" * 300}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 500}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "text"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        (LOGPROBS | {"top_logprobs": 21}, "logprobs"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"temperature": 3}, "temperature"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ],
)
def test_a_users_mistake_names_the_field(url: str, fields: dict, param: str) -> None:
    status, answer = call(f"{url}/v1/responses", {"input": "x"} | fields)
    assert status == 400 and param in answer["error"]["param"] and param in answer["error"]["message"], answer


def test_failures(client: openai.OpenAI) -> None:
    """Before the first event a status, and after it an event."""
    with pytest.raises(openai.InternalServerError, match="told to fail"):
        client.responses.create(model="tiny", input="<error>", stream=True)
