"""verify_drafts: the prefix of drafts that the target confirms, of rows of every kind side by side."""

import random

import pytest
import torch

from mambalign.kernels.verify_drafts import MISSING, verify_drafts, verify_drafts_on_gpu, verify_drafts_reference

FAR = 1 << 40  # tokens that 32 bits do not hold


def make_rows(num_drafts: int, num_rows: int, seed: int) -> tuple[list[list[int]], list[int], list[int], list[int]]:
    """Tokens that each row runs, whether it decodes, how often it samples, and all samples."""
    rng = random.Random(seed)
    inputs, is_decode, num_samples, sampled = [], [], [], []
    for r in range(num_rows):
        kind = rng.choice(("decode", "decode", "inert", "prompt", "piece")) if r else "all right"
        decodes = kind in ("decode", "inert", "all right")
        q = 0 if kind == "inert" else rng.randint(1, num_drafts + 1) if decodes else rng.randint(1, 9)
        q = num_drafts + 1 if kind == "all right" else q
        samples = q if decodes else int(kind == "prompt")
        targets = [FAR + rng.randint(0, 1) for _ in range(samples)]
        drafts = [
            target if kind == "all right" else rng.choice((target, target, FAR, MISSING)) for target in targets[:-1]
        ]
        inputs.append([5, *drafts][:q] if decodes else [FAR] * q)
        is_decode.append(int(decodes))
        num_samples.append(samples)
        sampled += targets
    return inputs, is_decode, num_samples, sampled


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 8])
def test_rows_of_every_kind(num_drafts: int, is_forced: bool, device: str) -> None:
    inputs, is_decode, num_samples, sampled = make_rows(num_drafts, 60, num_drafts)
    wanted = [num_drafts + 1 - r % (num_drafts + 1) for r in range(60)] if is_forced else None
    targets, counts, at = [], [], 0
    for r, (tokens, decodes, samples) in enumerate(zip(inputs, is_decode, num_samples, strict=True)):
        own = sampled[at : at + samples]
        at += samples
        kept = 0
        while kept < samples and (kept == 0 or tokens[kept] == own[kept - 1]):
            kept += 1
        if is_forced:
            kept = min(wanted[r], samples)
        targets.append(own + [MISSING] * (num_drafts + 1 - samples))
        num_there = sum(token != MISSING for token in tokens[1:]) if decodes else 0
        counts.append([kept, num_there, kept if decodes else len(tokens), kept if decodes else 0])

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lengths, samples = torch.tensor([len(tokens) for tokens in inputs]), torch.tensor(num_samples)
    arguments = (
        torch.tensor(sampled, device=device),
        torch.tensor([token for tokens in inputs for token in tokens], device=device),
        int32((lengths.cumsum(0) - lengths).tolist()),
        int32(lengths.tolist()),
        int32(is_decode),
        int32((samples.cumsum(0) - samples).tolist()),
        int32(num_samples),
        num_drafts,
        int32(wanted) if is_forced else None,
    )
    for run in (verify_drafts_reference, verify_drafts_on_gpu, verify_drafts):
        got_targets, got_counts = run(*arguments)
        assert got_targets.tolist() == targets and got_targets.dtype == torch.int64
        assert got_counts.T.tolist() == counts and got_counts.dtype == torch.int32
    assert {0, 1, num_drafts + 1} <= {count[0] for count in counts}


def test_a_step_that_samples_nothing(device: str) -> None:
    one, none = (torch.tensor([n], dtype=torch.int32, device=device) for n in (1, 0))
    no_ids = torch.zeros(0, dtype=torch.int64, device=device)
    for run in (verify_drafts_reference, verify_drafts_on_gpu):
        targets, counts = run(no_ids, no_ids + 7, none, one, none, none, none, 2)
        assert targets.tolist() == [[MISSING] * 3] and counts.T.tolist() == [[0, 0, 1, 0]]
