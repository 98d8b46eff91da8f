"""Text out of tokens: characters over token borders, stop strings over token borders, and nothing too early."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mambalign.engine.detokenizer import Detokenizer

CORPUS = ["def f(x):\n    return x + 1\n", "naïve café – 東京 🙂👩‍👩‍👧‍👦", "stop stopping the top"] * 3


def byte_level_tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


BYTES = byte_level_tokenizer(257)  # no merges: one token a byte
MERGED = byte_level_tokenizer(320)
END = MERGED.token_to_id("<|end|>")
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40) | st.text("stop 🙂é\n", max_size=40)


def run(detokenizer: Detokenizer, token_ids: list[int]) -> str:
    """The whole text, as the engine takes it: until the stop string, and what is held at the end."""
    text = ""
    for token_id in token_ids:
        text += detokenizer.append(token_id)
        if detokenizer.stop_string is not None:
            break
    return text + detokenizer.finish()


def one_at_a_time(tokenizer: Tokenizer, token_ids: list[int], stop: list[str], min_tokens: int = 0):
    """Reference: after each token, look through the whole text. Returns text, stop string, tokens used."""
    for count in range(max(1, min_tokens), len(token_ids) + 1):
        before = tokenizer.decode(token_ids[: count - 1]).rstrip("\ufffd")
        text = tokenizer.decode(token_ids[:count]).rstrip("\ufffd")
        found = [
            (start, number)
            for number, string in enumerate(stop)
            for start in range(len(text) - len(string) + 1)
            if text.startswith(string, start) and start + len(string) > len(before)
        ]
        if found:
            start, number = min(found)
            return text[:start], stop[number], count
    return tokenizer.decode(token_ids), None, len(token_ids)


@pytest.mark.parametrize("tokenizer", [BYTES, MERGED], ids=["bytes", "merged"])
@settings(deadline=None)
@given(text=TEXTS, prompt=TEXTS)
def test_joined_deltas_are_the_decoded_text(tokenizer, text, prompt):
    token_ids = tokenizer.encode(text).ids
    detokenizer = Detokenizer(tokenizer, tokenizer.encode(prompt).ids)
    deltas = [detokenizer.append(token_id) for token_id in token_ids]
    if not text.endswith("\ufffd"):  # a real one waits for what follows it
        assert "".join(deltas) == text
    assert "".join(deltas) + detokenizer.finish() == text
    assert detokenizer.num_tokens == len(token_ids)


@settings(deadline=None)
@given(st.lists(st.integers(0, MERGED.get_vocab_size() - 1), max_size=120))
def test_any_tokens_give_what_decoding_them_all_gives(token_ids):
    """Invalid UTF-8, special tokens and long runs of loose bytes included."""
    assert run(Detokenizer(MERGED), token_ids) == MERGED.decode(token_ids, skip_special_tokens=True)


def test_an_emoji_comes_whole():
    token_ids = BYTES.encode("a🙂b").ids
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.append(token_id) for token_id in token_ids] == ["a", "", "", "", "🙂", "b"]


def test_half_a_character_is_given_out_at_the_end_only():
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.append(i) for i in BYTES.encode("x🙂").ids[:-1]] == ["x", "", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_prompt_cut_inside_a_character_leaks_nothing():
    cut, rest = BYTES.encode("say é").ids[:-1], BYTES.encode("é").ids[-1:]
    assert run(Detokenizer(BYTES, cut), rest + BYTES.encode("ok").ids) == "\ufffdok"


def test_ids_outside_the_tokenizer_give_no_text():
    detokenizer = Detokenizer(MERGED, [-1, 10**6, 2**40], ["x"])
    for token_id in (MERGED.get_vocab_size(), 10**6, 2**32, 2**70, -1, END):
        assert detokenizer.append(token_id) == ""
    assert run(detokenizer, MERGED.encode("still here").ids) == "still here"
    assert detokenizer.num_tokens == 6 + len(MERGED.encode("still here").ids)


def test_a_leading_space_follows_from_the_prompt():
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "?": 2}, unk_token="?"))
    tokenizer.decoder = decoders.Metaspace()
    assert run(Detokenizer(tokenizer, [0]), [1, 0]) == " b a"
    assert run(Detokenizer(tokenizer), [1, 0]) == "b a"


def test_text_that_may_become_a_stop_string_is_held():
    detokenizer = Detokenizer(BYTES, stop=["\n\n", "END"])
    deltas = [detokenizer.append(i) for i in BYTES.encode("a\nbEN\nxEEND").ids]
    assert deltas == ["a", "", "\nb", "", "", "EN", "\nx", "", "E", "", ""]
    assert detokenizer.stop_string == "END"
    assert (detokenizer.finish(), detokenizer.append(5), detokenizer.num_tokens) == ("", "", 11)


def test_what_is_held_comes_out_at_the_end():
    assert run(Detokenizer(BYTES, stop=["END"]), BYTES.encode("the EN").ids) == "the EN"


def test_the_token_that_completed_a_stop_string_is_known():
    token_ids = MERGED.encode("the stop, stopping").ids
    detokenizer = Detokenizer(MERGED, stop=["top,"])
    assert run(detokenizer, token_ids) == "the s"
    assert MERGED.decode(token_ids[: detokenizer.num_tokens]).startswith("the stop,")
    assert "top," not in MERGED.decode(token_ids[: detokenizer.num_tokens - 1])


def test_the_character_after_a_stop_string_need_not_be_whole():
    """A token that ends the stop string and begins a character ends the text itself, not the one after it."""
    tokenizer = Tokenizer(models.BPE({"Ġ": 0, "s": 1, "Ã": 2, "©": 3, "sÃ": 4}, [("s", "Ã")]))
    tokenizer.decoder = decoders.ByteLevel()
    detokenizer = Detokenizer(tokenizer, stop=["ss"])
    assert [detokenizer.append(1), detokenizer.append(4), detokenizer.stop_string] == ["", "", "ss"]


@pytest.mark.parametrize(
    ("stop", "text", "kept", "found"),
    [
        (["bcd", "c"], "abcd", "ab", "c"),  # complete first, token by token
        (["ab", "abc"], "xabc", "x", "ab"),
        (["abcabd", "bca"], "abcabcabd", "a", "bca"),
        (["aab"], "aaaab", "aa", "aab"),
        (["ana", "nan"], "banana", "b", "ana"),
        (["🙂!"], "🙂🙂!", "🙂", "🙂!"),
    ],
)
def test_overlapping_stop_strings(stop, text, kept, found):
    detokenizer = Detokenizer(BYTES, stop=stop)
    assert run(detokenizer, BYTES.encode(text).ids) == kept
    assert detokenizer.stop_string == found


def test_inside_one_token_the_earliest_wins_then_the_first_listed():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, [("a", "b"), ("ab", "c")]))
    tokenizer.decoder = decoders.ByteLevel()
    for stop, kept, found in ((["c", "bc"], "a", "bc"), (["bc", "b"], "a", "bc"), (["b", "bc"], "a", "b")):
        detokenizer = Detokenizer(tokenizer, stop=stop)
        assert run(detokenizer, [4]) == kept
        assert detokenizer.stop_string == found


def test_stop_strings_count_from_min_tokens_on():
    token_ids = BYTES.encode("xx--x-x").ids
    for min_tokens, kept in ((0, ""), (1, ""), (2, "x"), (3, "xx--"), (6, "xx--x-"), (8, "xx--x-x")):
        detokenizer = Detokenizer(BYTES, stop=["x"], min_tokens=min_tokens)
        assert run(detokenizer, token_ids) == kept
    assert run(Detokenizer(BYTES, stop=["-x"], min_tokens=5), token_ids) == "xx-"  # begun before, completed after


def test_random_stops_against_looking_through_the_whole_text():
    rng = random.Random(3)
    num_stopped = 0
    for _ in range(400):
        text = "".join(rng.choices("ab🙂é ", k=rng.randrange(25)))
        stop = ["".join(rng.choices("ab🙂é", k=rng.randrange(1, 5))) for _ in range(rng.randrange(4))]
        tokenizer, min_tokens = rng.choice([BYTES, MERGED]), rng.choice([0, 0, 3, 9])
        token_ids = tokenizer.encode(text).ids
        detokenizer = Detokenizer(tokenizer, tokenizer.encode("b🙂").ids, stop, min_tokens)
        expected_text, expected_stop, num_tokens = one_at_a_time(tokenizer, token_ids, stop, min_tokens)
        assert run(detokenizer, token_ids) == expected_text
        assert detokenizer.stop_string == expected_stop
        assert detokenizer.num_tokens == num_tokens
        num_stopped += expected_stop is not None
    assert 50 < num_stopped < 350


def test_the_window_stays_short():
    detokenizer = Detokenizer(MERGED)
    for token_id in MERGED.encode(" ".join(CORPUS) * 20).ids:
        detokenizer.append(token_id)
        assert len(detokenizer._window) < 40
