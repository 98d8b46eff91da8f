"""`LLM.chat` and n on the shipped model."""

import weakref
from collections.abc import Iterator

import pytest

from mambalign.engine import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0)
TALK = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "Add two numbers."}]
START = [*TALK, {"role": "assistant", "content": "def add(a, b):"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(spec_tokens=3, max_model_len=512, cache_memory="32MiB", max_num_seqs=4) as llm:
        yield llm


def test_a_conversation_is_its_rendered_prompt(llm: LLM) -> None:
    (by_chat,) = llm.chat(TALK, GREEDY)
    assert by_chat.prompt == "<s># system: Write Python.\n\n# user: Add two numbers.\n\n# assistant:\n"
    assert (
        by_chat.prompt_token_ids
        == llm.core.tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_dict=True)["input_ids"]
    )
    (by_ids,) = llm.generate(by_chat.prompt_token_ids, GREEDY)
    assert by_chat.outputs[0].token_ids == by_ids.outputs[0].token_ids and len(by_ids.outputs[0].token_ids) == 12


def test_several_conversations_keep_their_order_and_params(llm: LLM) -> None:
    other = [{"role": "user", "content": "Read a file."}]
    alone = [llm.chat(talk, GREEDY)[0].outputs[0].text for talk in (TALK, other)]
    lengths = [GREEDY, SamplingParams(max_tokens=5, temperature=0)]
    first, second = llm.chat((talk for talk in (TALK, other)), (one for one in lengths))
    assert first.outputs[0].text == alone[0]
    assert len(second.outputs[0].token_ids) == 5 and alone[1].startswith(second.outputs[0].text)
    assert llm.chat([]) == []


def test_how_the_prompt_ends(llm: LLM) -> None:
    def prompt(messages: list[dict[str, str]], **options: bool) -> str:
        return llm.chat(messages, SamplingParams(max_tokens=1), **options)[0].prompt

    assert prompt(START).endswith("def add(a, b):\n\n# assistant:\n")
    assert prompt(START, add_generation_prompt=False).endswith("def add(a, b):\n\n")
    assert prompt(START, continue_final_message=True).endswith("# assistant:\ndef add(a, b):")


def test_a_template_of_ones_own_and_its_variables(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}{{ ending }}"
    one = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(one, GREEDY, chat_template=template, chat_template_kwargs={"ending": "!"})
    assert result.prompt == "user hi!"


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ([[]], {}, "messages must hold at least one message"),
        ([{"content": "hi"}], {}, r"messages\[0\]: must be a dict with role and content"),
        (["hi"], {}, r"messages\[0\]"),
        (TALK[0], {}, "messages: .*got dict"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages: is no Unicode text"),
        (TALK, {"continue_final_message": True}, "continue_final_message needs a final message of the assistant"),
        (START, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message and"),
        (TALK, {"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking is not used"),
        (TALK, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools is set by"),
        (TALK, {"chat_template": "{% if %}"}, "the chat template cannot be read"),
        (TALK, {"chat_template": "{{ raise_exception('no such talk') }}"}, "no such talk"),
    ],
)
def test_what_cannot_be_rendered_is_refused(llm: LLM, messages: list, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.chat(messages, GREEDY, **options)
    llm.core.check()
    assert not llm.core.has_work()


def test_a_checkpoint_without_a_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.core.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat(TALK)


def test_choices_are_different_texts_and_the_same_every_time(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=5)
    texts = [[choice.token_ids for choice in llm.chat(TALK, params)[0].outputs] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len({tuple(ids) for ids in texts[0]}) == 3
    (single,) = llm.chat(TALK, SamplingParams(max_tokens=12, temperature=1.0, seed=5))[0].outputs
    assert single.token_ids == texts[0][0], "choice 0 is what one choice would have been"


def test_leaving_the_context_frees_the_model() -> None:
    with LLM(max_model_len=256, cache_memory="16MiB", max_num_seqs=1) as llm:
        assert llm.generate("def f(", GREEDY)[0].outputs[0].text
        model, cache = weakref.ref(llm.core.model), weakref.ref(llm.core.runner.cache)
    assert model() is None and cache() is None
