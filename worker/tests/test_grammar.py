"""Masks of a grammar against a plain enumeration, drafts that are taken back, and what cannot be used."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.sampling_params import StructuredOutputs

EOS, THINK_END = 0, 1
PADDED_VOCAB = 270  # 5 ids more than the tokenizer knows


def make_tokenizer(close_is_special: bool) -> Tokenizer:
    words = ["</s>", "</think>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [("a", "b"), ("1", "2"), ("tr", "ue")]
    vocab = {word: i for i, word in enumerate([*words, "tr", "ue", *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "r"), ("u", "e"), *pairs]))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    add = tokenizer.add_special_tokens if close_is_special else tokenizer.add_tokens
    add([AddedToken("</think>", special=close_is_special)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = make_tokenizer(True)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, PADDED_VOCAB, [EOS])


def ids(text: str, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    return tokenizer.encode(text).ids


def allowed(mask: np.ndarray) -> set[str | None]:
    """Texts of the tokens of a mask; None is the end."""
    bits = np.unpackbits(mask, bitorder="little")[:PADDED_VOCAB]
    tokens = np.nonzero(bits)[0].tolist()
    return {None if i == EOS else TOKENIZER.decode([i], skip_special_tokens=False) for i in tokens}


def test_masks_are_the_tokens_that_lead_on(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutputs(regex="(ab|a1)2?"))
    assert [allowed(m) for m in state.masks([], [])] == [{"a", "ab"}]
    assert [allowed(m) for m in state.masks(ids("a"), [])] == [{"b", "1", "12"}]
    assert [allowed(m) for m in state.masks([*ids("a"), *ids("12")], [])] == [{None}]


def test_a_model_may_lack_tokens_of_its_tokenizer() -> None:
    """Here all those of two characters and more."""
    state = GrammarCompiler(TOKENIZER, 256, [EOS]).start(StructuredOutputs(regex="(ab|a1)2?"))
    masks = state.masks([], [*ids("a"), *ids("1")])
    assert [allowed(mask) for mask in masks] == [{"a"}, {"b", "1"}, {"2", None}]
    assert all(len(mask) == 256 // 8 for mask in masks)


def test_drafts_are_looked_through_and_taken_back(compiler: GrammarCompiler) -> None:
    wanted = StructuredOutputs(json={"type": "array", "items": {"type": "boolean"}})
    text = ids("[true,true]")
    expected = [allowed(compiler.start(wanted).masks(text[:n], [])[0]) for n in range(len(text) + 1)]
    state, again = compiler.start(wanted), compiler.start(wanted)
    for n in range(len(text) + 1):
        for num_drafts in range(len(text) - n + 1):
            masks = state.masks(text[:n], text[n : n + num_drafts])
            assert [allowed(m) for m in masks] == expected[n : n + num_drafts + 1]
        assert allowed(again.masks(text[:n], [text[-1]])[0]) == expected[n]
    assert expected[-1] == {None}


def test_a_choice_may_be_of_many_texts(compiler: GrammarCompiler) -> None:
    texts = [f"{i}" for i in range(1, 20_000)]
    masks = compiler.start(StructuredOutputs(choice=texts)).masks([], ids("1999"))
    assert all(mask is not None for mask in masks)
    assert allowed(masks[0]) == {*"123456789", "12"}, "nothing of them begins with 0"
    assert allowed(masks[3]) == {None, *"0123456789", "12"}
    assert allowed(masks[4]) == {None, *"0123456789"}, "five digits at most"


def test_a_grammar_that_grows_too_large_says_so(compiler: GrammarCompiler) -> None:
    lark = "start: " + " | ".join(f'"{i}"' for i in range(3000))
    state = compiler.start(StructuredOutputs(grammar=lark))
    assert allowed(state.masks([], [])[0]) and state.error is None
    assert state.masks(ids("1"), []) == [None]
    assert "Current row has" in state.error and "not allow" not in state.error


def test_behind_a_draft_that_is_not_allowed_anything_goes(compiler: GrammarCompiler) -> None:
    state = compiler.start(StructuredOutputs(choice=["ab", "a2"]))
    masks = state.masks([], [*ids("a"), *ids("x"), *ids("2")])
    assert [m if m is None else allowed(m) for m in masks] == [{"a", "ab"}, {"b", "2"}, None, None]
    assert [m is None for m in state.masks([], [-1, -1])] == [False, True, True]
    masks = state.masks(ids("ab"), [EOS, EOS])
    assert [m if m is None else allowed(m) for m in masks] == [{None}, None, None]
    assert state.error is None
    state.masks([*ids("ab"), *ids("x")], [])
    assert "not allow" in state.error and state.masks([*ids("ab"), *ids("x")], []) == [None]


@pytest.mark.parametrize(
    ("wanted", "texts", "wrong"),
    [
        (StructuredOutputs(json_object=True), ["{}", '{\n  "a": [1]}'], ["[]", "{" + " " * 40]),
        (StructuredOutputs(json='{"enum": [1, "é"]}'), ["1", '"é"'], ["2"]),
        (StructuredOutputs(grammar='start: "a" x\nx: /[12]+/'), ["a12"], ["b"]),
        (StructuredOutputs(grammar='root ::= "a" | "b" root'), ["bba"], ["ab"]),
        (StructuredOutputs(choice=['"', "\\n", "é"]), ['"', "\\n", "é"], ["\n"]),
    ],
)
def test_every_form(compiler: GrammarCompiler, wanted: StructuredOutputs, texts: list[str], wrong: list[str]) -> None:
    def is_allowed(text: str) -> bool:
        state, tokens = compiler.start(wanted), ids(text)
        masks = state.masks([], tokens)
        return all(m is not None for m in masks) and None in allowed(masks[-1])

    assert all(map(is_allowed, texts)) and not any(map(is_allowed, wrong))


@pytest.mark.parametrize("close_is_special", [True, False])
@pytest.mark.parametrize(("start", "text"), [("inside", "{hm 1</think>\n\n12"), ("before", "<think>{</think>12"),
                                             ("before", "12"), ("inside", "</think>2")])  # fmt: skip
def test_reasoning_is_free(close_is_special: bool, start: str, text: str) -> None:
    tokenizer = make_tokenizer(close_is_special)
    compiler = GrammarCompiler(tokenizer, PADDED_VOCAB, [EOS])
    state = compiler.start(StructuredOutputs(regex="1?2", reasoning=start))
    masks = state.masks([], ids(text, tokenizer))
    assert all(m is not None for m in masks) and allowed(masks[-1]) == {None}
    first = allowed(compiler.start(StructuredOutputs(regex="1?2", reasoning=start)).masks([], [])[0])
    assert None not in first and ("x" in first) == (start == "inside")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (StructuredOutputs(regex="("), "structured_outputs: the grammar cannot be used.*unclosed"),
        (StructuredOutputs(json={"type": "nonsense"}, field="response_format"), "response_format: .*nonsense"),
        (StructuredOutputs(json="{"), "structured_outputs: "),
        (StructuredOutputs(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (StructuredOutputs(grammar="start: nothing"), "nothing"),
        (StructuredOutputs(grammar="root ::= ("), "structured_outputs: "),
        (StructuredOutputs(json="[" * 100_000), "structured_outputs: .*recursion"),
        (StructuredOutputs(grammar="start: start"), "structured_outputs: .*NoExtension"),
    ],
)
def test_what_cannot_be_used_says_why(compiler: GrammarCompiler, wanted: StructuredOutputs, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compiler.compile(wanted)


@pytest.mark.parametrize("reasoning", [None, "inside"])
def test_calls_may_come_instead(compiler: GrammarCompiler, reasoning: str | None) -> None:
    wanted = StructuredOutputs(json={"type": "integer"}, calls='start: "<call>" /[ab]/', reasoning=reasoning)
    for text, fits in [("12", True), ("<call>a", True), ("<call>12", False), ("a", False)]:
        tokens = ids(("x</think>" if reasoning else "") + text)
        masks = compiler.start(wanted).masks([], tokens)
        assert (all(m is not None for m in masks) and None in allowed(masks[-1])) == fits, text


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    wanted = StructuredOutputs(json=json.loads('{"type": "integer"}'))
    assert compiler.compile(wanted) is compiler.compile(StructuredOutputs(json={"type": "integer"}))
