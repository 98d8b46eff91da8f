"""Several tokens a step, an end anywhere in the run: a stream joins to the whole, as if tokens came one at a time.

The fake core repeats its prompt, so what must come is known.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess, call

PROMPT = "añ€🙂b"  # characters of 1 to 4 tokens
DATA = PROMPT.encode() * 4


@pytest.fixture(scope="module", params=[0, 1, 3, 7])
def url(fake_model: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    with ServerProcess(fake_model, "--spec-tokens", str(request.param), program="fake_core.py") as server:
        yield server.url


def both(url: str, **fields: object) -> dict:
    """The choice of a completion, which its stream must give as well: text, ids, log-probabilities, reason, usage."""
    body = {"prompt": PROMPT, "logprobs": 1, "return_token_ids": True, **fields}
    status, whole = call(f"{url}/v1/completions", body)
    assert status == 200, whole
    stream = call(f"{url}/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})[1]
    events = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n")[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    (choice,) = whole["choices"]
    assert "".join(c["text"] for c in choices) == choice["text"]
    assert [i for c in choices for i in c["token_ids"]] == choice["token_ids"]
    for name in choice["logprobs"]:
        assert [x for c in choices if c["logprobs"] for x in c["logprobs"][name]] == choice["logprobs"][name]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [choice["finish_reason"]]
    used = {key: events[-1]["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    assert used.items() <= whole["usage"].items() and used["completion_tokens"] == len(choice["token_ids"])
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    return choice


@pytest.mark.parametrize("length", range(1, 24))
def test_length_anywhere(url: str, length: int) -> None:
    choice = both(url, max_tokens=length)
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == length
    assert choice["text"] == DATA[:length].decode(errors="replace")[: len(choice["text"])]
    assert choice["text"].rstrip("\ufffd") == DATA[:length].decode(errors="ignore")


@pytest.mark.parametrize("start", range(2 * len(PROMPT)))
@pytest.mark.parametrize("width", [1, 2, 6])
def test_stop_string_anywhere(url: str, start: int, width: int) -> None:
    text = PROMPT * 4
    stop = text[start : start + width]
    choice = both(url, max_tokens=36, stop=[stop, "never"])
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    end = text.index(stop) + len(stop)
    assert len(choice["token_ids"]) == len(text[:end].encode()), "and no token more"
    assert choice["stop_reason"] == stop
