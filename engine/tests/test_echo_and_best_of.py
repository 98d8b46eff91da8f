"""`echo`, `best_of` and log-probabilities of prompts, in OpenAI's style; the fake core repeats prompts."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess, call

PROMPT = "naïve €"  # characters of 1, 2 and 3 tokens
NUM_TOKENS = len(PROMPT.encode())


@pytest.fixture(scope="module", params=[0, 1, 3, 7])
def url(fake_model: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    options = ("--spec-tokens", str(request.param))
    with ServerProcess(fake_model, *options, program="fake_core.py") as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("prompt", [PROMPT, list(PROMPT.encode())], ids=["text", "ids"])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_echo_joins_to_the_whole(
    client: openai.OpenAI, url: str, prompt: str | list[int], logprobs: int | None
) -> None:
    if not isinstance(prompt, str):
        prompt = call(f"{url}/tokenize", {"prompt": PROMPT})[1]["tokens"]
    fields = {"model": "tiny", "prompt": [prompt, prompt], "max_tokens": 10, "n": 2, "echo": True, "logprobs": logprobs}
    whole = client.completions.create(**fields)
    assert [choice.text for choice in whole.choices] == [PROMPT + PROMPT] * 4
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2 * NUM_TOKENS, 40)
    texts, lists = [""] * 4, [[] for _ in range(4)]
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs:
                lists[choice.index].append(choice.logprobs)
    assert texts == [choice.text for choice in whole.choices]
    for choice, parts in zip(whole.choices, lists, strict=True):
        if logprobs is None:
            assert choice.logprobs is None and not parts
            continue
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for part in parts for item in getattr(part, name)] == getattr(choice.logprobs, name)
        assert len(choice.logprobs.tokens) == NUM_TOKENS + 10
        assert choice.logprobs.token_logprobs == [None] + [-0.5] * (NUM_TOKENS + 9)
        assert choice.logprobs.top_logprobs[0] is None
        for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            assert token.startswith("bytes:") or choice.text[offset] == token


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_a_prompt_generates_nothing(client: openai.OpenAI, stream: bool) -> None:
    fields = {"model": "tiny", "prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
        usage, choices = chunks[-1].usage, [choice for chunk in chunks for choice in chunk.choices]
        assert [c.finish_reason for c in choices] == [None, "length"]
    else:
        answer = client.completions.create(**fields)
        usage, choices = answer.usage, answer.choices
        assert choices[0].finish_reason == "length"
    assert "".join(choice.text for choice in choices) == "abc"
    assert choices[0].logprobs.tokens == ["a", "b", "c"] and usage.completion_tokens == 0
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_best_of(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=2, n=2, best_of=3)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    assert answer.usage.completion_tokens == 12 and answer.choices[0].logprobs is None
    asked = client.completions.create(model="tiny", prompt="ab", max_tokens=2, best_of=2, logprobs=1)
    assert asked.choices[0].logprobs.tokens == ["a", "b"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_in_both_endpoints(client: openai.OpenAI, stream: bool) -> None:
    options = {"model": "tiny", "max_tokens": 5, "extra_body": {"prompt_logprobs": 2}, "stream": stream}
    answers = [
        client.completions.create(prompt="abc", **options),
        client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **options),
    ]
    for answer, text in zip(answers, ("abc", "[user]x\n[assistant]"), strict=True):
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert [c.index for c in choices if getattr(c, "prompt_logprobs", None)] == [0]
        lists = choices[0].prompt_logprobs
        assert lists[0] is None and len(lists) == len(text)
        for character, entries in zip(text[1:], lists[1:], strict=True):
            entry = next(iter(entries.values()))
            assert entry == {"logprob": -0.5, "rank": 1, "decoded_token": character} and len(entries) == 2
