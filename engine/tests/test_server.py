"""The API as clients see it, over HTTP with the openai client; the texts come from the fake core."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from fake_core import EOS, MAX_MODEL_LEN, SPECIAL, make_checkpoint
from server_process import ServerProcess, call, metrics_text

PROMPT = "def f(x):"
VOCAB = len(SPECIAL) + 256


@pytest.fixture(scope="module")
def url(fake_model: Path) -> Iterator[str]:
    with ServerProcess(fake_model, "--spec-tokens", "1", program="fake_core.py") as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def completion(url: str, **fields: object) -> tuple[int, dict]:
    return call(f"{url}/v1/completions", {"prompt": PROMPT, **fields})


def chat(url: str, **fields: object) -> tuple[int, dict]:
    return call(f"{url}/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})


def metric(url: str, name: str) -> float:
    for line in metrics_text(url).splitlines():
        if line.startswith(name + " "):
            return float(line.split()[-1])
    raise AssertionError(f"no metric {name}")


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", MAX_MODEL_LEN)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'big' is not served here"):
        client.models.retrieve("big")


def test_completion(client: openai.OpenAI) -> None:
    cold = client.completions.create(model="tiny", prompt="never seen", max_tokens=5)
    warm = client.completions.create(model="tiny", prompt="never seen", max_tokens=5)
    assert cold.choices[0].text == "never" and cold.choices[0].finish_reason == "length"
    assert (cold.usage.prompt_tokens, cold.usage.completion_tokens, cold.usage.total_tokens) == (10, 5, 15)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == 9
    details = warm.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 1)


def test_completion_default_length_and_stop(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt=PROMPT).usage.completion_tokens == 16
    stopped = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=50, stop="x)")
    assert stopped.choices[0].text == "def f(" and stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].stop_reason == "x)"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        ([70, 71], None),
        ([[70, 71], [72, 73]], None),
    ],
)
def test_forms_of_a_prompt(client: openai.OpenAI, url: str, prompt: object, texts: list[str] | None) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    if texts is None:
        lists = prompt if isinstance(prompt[0], list) else [prompt]
        texts = [call(f"{url}/detokenize", {"tokens": ids})[1]["prompt"] for ids in lists]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_n_counts_the_prompt_once(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 8)


def test_stream_joins_to_the_whole(client: openai.OpenAI) -> None:
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "n": 2}
    whole = client.completions.create(**fields)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in client.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        if chunk.usage:
            usage = chunk.usage
            assert chunk.choices == []
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices] and reasons == ["length", "length"]
    assert usage.completion_tokens == whole.usage.completion_tokens == 40
    assert usage.prompt_tokens_details.cached_tokens == len(PROMPT) - 1


def test_chat(client: openai.OpenAI, url: str) -> None:
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    ids = call(f"{url}/tokenize", {"messages": messages})[1]["tokens"]
    rendered = call(f"{url}/detokenize", {"tokens": ids})[1]["prompt"]
    assert rendered == "[system]s\n[user]hi\n[assistant]"
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    assert answer.choices[0].message.content == rendered[:8] and answer.choices[0].message.role == "assistant"
    turns = [*messages, answer.choices[0].message, {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model="tiny", messages=turns, max_tokens=1).choices
    rest = client.chat.completions.create(model="tiny", messages=messages)
    assert rest.usage.total_tokens == MAX_MODEL_LEN


def test_chat_stream(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=9, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "[user]hi\n"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "logprobs": 2}
    whole = client.completions.create(**fields).choices[0].logprobs
    assert whole.tokens == list("def f") and whole.token_logprobs == [-0.5] * 5
    assert whole.text_offset == [0, 1, 2, 3, 4] and whole.top_logprobs[0]["d"] == -0.5
    assert [len(top) for top in whole.top_logprobs] == [2] * 5
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**fields, stream=True)]
    assert [t for part in parts for t in part.tokens] == whole.tokens
    assert [t for part in parts for t in part.text_offset] == whole.text_offset


def test_chat_logprobs(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    fields = {"model": "tiny", "messages": messages, "max_tokens": 3, "logprobs": True}
    entries = client.chat.completions.create(**fields, top_logprobs=2).choices[0].logprobs.content
    assert [e.token for e in entries] == ["[", "u", "s"] and entries[0].bytes == [0x5B]
    assert [len(e.top_logprobs) for e in entries] == [2, 2, 2] and entries[0].top_logprobs[0].token == "["
    chunks = client.chat.completions.create(**fields, stream=True)
    tokens = [e.token for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert tokens == ["[", "u", "s"]


def test_return_token_ids(url: str, client: openai.OpenAI) -> None:
    ids = call(f"{url}/tokenize", {"prompt": PROMPT})[1]
    assert ids["count"] == len(PROMPT) and ids["max_model_len"] == MAX_MODEL_LEN
    (choice,) = completion(url, max_tokens=4, return_token_ids=True)[1]["choices"]
    assert choice["prompt_token_ids"] == ids["tokens"] and choice["token_ids"] == ids["tokens"][:4]


@pytest.mark.parametrize("kind", ["completion", "echo", "chat"])
def test_a_stream_tells_the_ids_of_the_prompt_once(url: str, client: openai.OpenAI, kind: str) -> None:
    fields = {"model": "tiny", "max_tokens": 4, "n": 2, "stream": True, "extra_body": {"return_token_ids": True}}
    if kind == "chat":
        messages = [{"role": "user", "content": "hi"}]
        prompt = call(f"{url}/tokenize", {"messages": messages})[1]["tokens"]
        chunks = client.chat.completions.create(messages=messages, **fields)
    else:
        prompt = call(f"{url}/tokenize", {"prompt": PROMPT})[1]["tokens"]
        chunks = client.completions.create(prompt=PROMPT, echo=kind == "echo", **fields)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for index in (0, 1):
        first, *others = [choice for choice in choices if choice.index == index]
        assert first.prompt_token_ids == prompt
        assert others and not any(hasattr(choice, "prompt_token_ids") for choice in others)
        assert [token for choice in (first, *others) for token in choice.token_ids] == prompt[:4]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 500}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": "x" * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 129}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"guided_json": {}}, "guided_json"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "max_tokens": 500}, "max_tokens"),
    ],
)
def test_a_users_mistake_names_the_field(url: str, fields: dict, param: str) -> None:
    status, answer = completion(url, **fields)
    assert status == 400, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and param in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 2}, "max_tokens"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_a_users_mistake_in_a_chat(url: str, fields: dict, param: str) -> None:
    status, answer = chat(url, **fields)
    assert status == 400 and answer["error"]["param"] == param and param in answer["error"]["message"]


def test_null_and_neutral_fields_are_fine(url: str) -> None:
    names = "max_tokens temperature top_p n stream stream_options logprobs stop seed logit_bias user suffix echo"
    assert completion(url, **dict.fromkeys(names.split()))[0] == 200
    assert completion(url, best_of=1, echo=False, user="me", stream=False)[0] == 200
    assert chat(url, tools=[], response_format={"type": "text"}, store=False, tool_choice="none")[0] == 200


def test_other_errors_have_the_same_shape(url: str) -> None:
    for path, body, status in [
        ("/v1/nothing", None, 404),
        ("/v1/completions", None, 405),
        ("/v1/completions", b"{", 400),
        ("/v1/completions", {"prompt": "x", "model": "big"}, 404),
        ("/v1/completions", {"prompt": "<error>"}, 500),
        ("/v1/completions", {"prompt": "<error>", "stream": True}, 500),
        ("/detokenize", {"tokens": [VOCAB]}, 400),
        ("/tokenize", {}, 400),
    ]:
        got, answer = call(url + path, body)
        assert got == status and answer["error"]["message"], (path, body, answer)


def test_a_wrong_method_is_told_the_right_one(url: str) -> None:
    for path, method, allowed in [("/v1/completions", "PUT", "POST"), ("/health", "POST", "GET, HEAD")]:
        request = urllib.request.Request(url + path, b"{}", method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        answer = json.loads(refused.value.read())
        assert refused.value.code == 405 and refused.value.headers["Allow"] == allowed
        assert answer["error"]["message"] == f"{method} is not a method of this path: use {allowed}"


def test_error_in_the_middle_of_a_stream(client: openai.OpenAI) -> None:
    """The failing choice must not end the stream as if it were whole."""
    with pytest.raises(openai.APIError, match="told to fail"):
        list(client.completions.create(model="tiny", prompt=["ab", "<error>"], stream=True))


def test_metrics_agree_with_usage(url: str) -> None:
    prompt = f"unique {time.time()}"
    names = ["prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total",
             "spec_decode_num_accepted_tokens_total", "e2e_request_latency_seconds_count",
             'request_success_total{finished_reason="length"}', "inter_token_latency_seconds_count"]  # fmt: skip
    before = {name: metric(url, f"mambalign:{name}") for name in names}
    usages = [completion(url, prompt=prompt, max_tokens=6)[1]["usage"] for _ in range(2)]
    delta = {name: metric(url, f"mambalign:{name}") - before[name] for name in names}
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert list(delta.values()) == [2 * len(prompt), cached, 12, 6, 2, 2, 8] and cached == len(prompt) - 1


def test_reset_prefix_cache(url: str) -> None:
    completion(url)
    assert call(f"{url}/reset_prefix_cache", b"") == (200, {"reset": True})
    assert completion(url)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def wait_running(url: str, count: int) -> None:
    """Until `count` requests run. A <slow> text of 250 tokens takes 1.25 seconds: waiting for its end fails."""
    end = time.monotonic() + 1.0
    while metric(url, "mambalign:num_requests_running") != count:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_aborts(url: str, stream: bool) -> None:
    aborted = 'mambalign:request_success_total{finished_reason="abort"}'
    before = metric(url, aborted)
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    body = {"prompt": "<slow>", "max_tokens": 250, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse() if stream else None
    wait_running(url, 1)
    if response is not None:
        response.close()
    connection.close()
    wait_running(url, 0)
    assert metric(url, aborted) == before + 1


def test_fresh_metrics_keys_and_no_chat_template(tmp_path: Path) -> None:
    """One more server: a key, another name, no template, nothing asked yet."""
    model = make_checkpoint(tmp_path / "plain", chat_template=None)
    options = ("--api-key", "secret", "--served-model-name", "mine", "--spec-tokens", "2")
    with ServerProcess(model, *options, program="fake_core.py") as server:
        url = server.url
        assert "serving mine at" in server.output and "Bearer KEY" in server.output
        text = metrics_text(url)
        for name in (
            "num_requests_running", "num_requests_waiting", "prefix_cache_queries_total",
            "prefix_cache_hits_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total", "time_to_first_token_seconds_count",
            'request_success_total{finished_reason="stop"}',
            'spec_decode_num_accepted_tokens_per_pos_total{position="1"}',
            'fused_copy_checks_total{bias="2",layout="SD",runner="v2"}',
            "fused_copy_mismatches_total",
        ):  # fmt: skip
            assert f"mambalign:{name} 0.0\n" in text
        assert call(f"{url}/health")[0] == 200
        for path, body in [("/v1/models", None), ("/v1/completions", {"prompt": "x"}), ("/tokenize", {})]:
            status, answer = call(url + path, body, {"Authorization": "Bearer wrong"})
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret")
        assert client.models.list().data[0].id == "mine"
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="mine", messages=[{"role": "user", "content": "x"}])


def test_bytes_of_a_split_character(url: str) -> None:
    (choice,) = completion(url, prompt="é", max_tokens=2, logprobs=0)[1]["choices"]
    assert choice["text"] == "é" and choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert completion(url, prompt=[EOS], max_tokens=1, logprobs=0)[1]["choices"][0]["logprobs"]["tokens"] == ["</s>"]
