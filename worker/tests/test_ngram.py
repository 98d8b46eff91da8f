"""The n-gram index against a scan of the whole text."""

import random

import pytest
import torch

from mambalign.worker.ngram import NgramIndex, propose_ngrams


def propose(text, k):
    index = NgramIndex()
    index.extend(text)
    return index.propose(k)


def scan(token_ids, k, min_n, max_n):
    """Reference: longest ending first, then the latest earlier occurrence, copied token by token."""
    for n in range(min(max_n, len(token_ids)), min_n - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[len(token_ids) - n :]:
                text = list(token_ids)
                for j in range(k):
                    text.append(text[start + n + j])
                return text[len(token_ids) :]
    return []


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_index_equals_scan_after_every_piece(min_n, max_n):
    rng = random.Random(min_n * 10 + max_n)
    num_hits = 0
    for _ in range(60):
        index, text = NgramIndex(min_n, max_n), []
        for _ in range(25):
            piece = rng.choices(range(rng.choice([2, 4, 9])), k=rng.randrange(4))
            index.extend(piece)
            text += piece
            k = rng.randrange(1, 8)
            guess = index.propose(k)
            assert guess == scan(text, k, min_n, max_n)
            assert len(guess) in (0, k)
            num_hits += bool(guess)
    assert num_hits > 100


def test_the_most_recent_occurrence_counts():
    assert propose([1, 2, 7, 7, 1, 2, 8, 9, 1, 2], 2) == [8, 9]


def test_the_longest_ending_counts():
    assert propose([3, 1, 2, 7, 4, 1, 2, 8, 3, 1, 2], 1) == [7]


def test_a_loop_is_guessed_beyond_the_known_text():
    assert propose([6, 1, 2, 3, 1, 2, 3], 5) == [1, 2, 3, 1, 2]
    assert propose([4, 4, 4], 3) == [4, 4, 4]


def test_nothing_seen_before_gives_no_drafts():
    for text in ([], [1], [1, 1], [1, 2, 3, 4]):
        assert propose(text, 3) == []


def test_propose_changes_nothing():
    index = NgramIndex()
    index.extend([1, 2, 3, 1, 2])
    assert index.propose(2) == index.propose(2) == [3, 1]
    assert index.token_ids == [1, 2, 3, 1, 2]


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 2), (3, 2)])
def test_wrong_lengths_are_refused(min_n, max_n):
    with pytest.raises(ValueError, match="min_n"):
        NgramIndex(min_n, max_n)


def test_many_texts_on_the_device_equal_the_index():
    rng = random.Random(7)
    num_hits = 0
    for _ in range(300):
        k, texts = rng.randrange(1, 8), [rng.choices(range(4), k=rng.randrange(1, 30)) for _ in range(3)]
        history = torch.randint(0, 4, (len(texts), 40), generator=torch.Generator().manual_seed(rng.randrange(99)))
        for row, text in enumerate(texts):
            history[row, : len(text)] = torch.tensor(text)
        guesses = propose_ngrams(history, torch.tensor([len(text) for text in texts]), k).tolist()
        assert guesses == [propose(text, k) or [-1] * k for text in texts]
        num_hits += sum(guess[0] >= 0 for guess in guesses)
    assert num_hits > 100
