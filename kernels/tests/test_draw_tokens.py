"""Draws against a loop over the vocabulary in Python's own numbers, and the kernel against the reference."""

import importlib
import math
import random

import pytest
import torch

from mambalign.kernels.draw_tokens import Draws, draw_tokens_on_gpu, draw_tokens_reference
from mambalign.kernels.noise import gumbel_noise, noise_bits, position_keys, stream_key
from mambalign.kernels.sampling import NO_BEST


def loop(logits: list[float], key: int, temperature: float, floor: float, top_k: int, top_p: float) -> int:
    best = max(logits)
    value = {i: (logit - best) / temperature for i, logit in enumerate(logits)}
    order = [i for i in sorted(value, key=lambda i: (-value[i], i)) if value[i] >= floor][:top_k]
    total, mass, kept = math.fsum(math.exp(value[i]) for i in order), 0.0, []
    for i in order:
        if not kept or top_p >= 1.0 or mass < top_p * total:
            kept.append(i)
        mass += math.exp(value[i])
    noise = gumbel_noise(torch.tensor(key), torch.arange(len(logits))).tolist()
    return max(kept, key=lambda i: (value[i] + noise[i], -i))


def moved(draws: Draws, device: str) -> Draws:
    return Draws(*(tensor.to(device) for tensor in draws))


def make(num_rows: int, vocab_size: int, seed: int, device: str) -> tuple[torch.Tensor, Draws]:
    """Rows with every mixture of filters; a third of them full of ties."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * torch.logspace(-1, 1, num_rows)[:, None]
    logits[::3] = logits[::3].round()
    rows = torch.randperm(num_rows, generator=generator)[: num_rows - 2]
    count = len(rows)
    draws = Draws(
        rows,
        position_keys(torch.tensor([stream_key(5, i % 2) for i in range(count)]), torch.arange(count)),
        torch.tensor([rng.choice([0.3, 1.0, 1.7]) for _ in rows]),
        torch.tensor([rng.choice([-math.inf, -math.inf, math.log(0.2), 0.0]) for _ in rows]),
        torch.tensor([rng.choice([1, 2, 7, max(1, vocab_size - 1), vocab_size, 5 * vocab_size]) for _ in rows]),
        torch.tensor([rng.choice([0.0, 1e-9, 0.3, 0.9, 0.999, 1.0, 1.0]) for _ in rows], dtype=torch.float64),
    )
    return logits.to(device), moved(draws, device)


@pytest.mark.parametrize("vocab_size", [1, 2, 37, 300])
def test_every_mixture_of_filters_against_the_loop(vocab_size: int) -> None:
    for seed in range(8):
        logits, draws = make(20, vocab_size, seed, "cpu")
        want = [loop(logits[row].tolist(), *rest) for row, *rest in zip(*(t.tolist() for t in draws), strict=True)]
        assert draw_tokens_reference(logits, draws).tolist() == want


@pytest.mark.parametrize(("vocab_size", "block"), [(1, 16), (2, 64), (100, 32), (257, 128), (300, 512)])
def test_the_kernel_draws_what_the_reference_draws(vocab_size: int, block: int, device: str) -> None:
    for seed in range(2):
        logits, draws = make(14, vocab_size, seed, device)
        out = torch.full((14,), 7, device=device)
        without_best = draws.rows[:2].tolist()
        logits[without_best, -1] = math.nan
        out[without_best] = NO_BEST.value
        draw_tokens_on_gpu(out, logits, draws, block=block)
        want = torch.full((14,), 7)
        want[draws.rows.cpu()] = draw_tokens_reference(logits.cpu(), moved(draws, "cpu"))
        want[without_best] = NO_BEST.value
        assert out.tolist() == want.tolist()


def test_a_vocabulary_of_full_size(device: str) -> None:
    """Flat rows too: their kept tokens are many more than the reference looks at first."""
    torch.manual_seed(0)
    logits = torch.cat([torch.randn(2, 5000) * 0.01, torch.randn(1, 5000) * 8, torch.zeros(1, 5000)])
    rows, top_k = torch.arange(4), torch.full((4,), 5000)
    keys = position_keys(torch.tensor(stream_key(1, 0)), torch.arange(4))
    top_p = torch.tensor([0.97, 0.2, 0.9, 0.5], dtype=torch.float64)
    draws = Draws(rows, keys, torch.ones(4), torch.full((4,), -math.inf), top_k, top_p)
    want = [loop(logits[i].tolist(), int(keys[i]), 1.0, -math.inf, 5000, float(top_p[i])) for i in range(4)]
    assert draw_tokens_reference(logits, draws).tolist() == want
    out = torch.zeros(4, dtype=torch.int64, device=device)
    draw_tokens_on_gpu(out, logits.to(device), moved(draws, device))
    assert out.tolist() == want


def test_noise_is_splitmix64() -> None:
    """The first outputs for seed 1234567 as printed by the reference implementation of SplitMix64."""
    bits = noise_bits(torch.tensor([1234567]), torch.arange(3))
    assert [value % 2**64 for value in bits.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_noise_depends_on_seed_choice_and_position_only_and_is_finite() -> None:
    positions = torch.arange(500)
    streams = [stream_key(seed, choice) for seed in (-1, 0, 1, 2**63 - 1) for choice in range(8)]
    assert len({key for stream in streams for key in position_keys(torch.tensor(stream), positions).tolist()}) == 16_000
    ids = torch.arange(50_000)
    whole = gumbel_noise(torch.tensor([99]), ids)
    assert whole.isfinite().all() and abs(whole.mean().item() - 0.5772) < 0.02
    for start, stop in ((0, 1), (17, 1234), (49_999, 50_000)):
        assert torch.equal(gumbel_noise(torch.tensor([99]), ids[start:stop]), whole[start:stop])
    scattered = torch.randperm(50_000)[:777]
    assert torch.equal(gumbel_noise(torch.tensor([99]), scattered), whole[scattered])


def test_wrong_dtypes_are_refused(device: str) -> None:
    logits, draws = make(5, 9, 0, device)
    module = importlib.import_module("mambalign.kernels.draw_tokens")
    with pytest.raises(ValueError, match="dtypes"):
        module.draw_tokens_on_gpu(torch.zeros(5, device=device), logits, draws)
