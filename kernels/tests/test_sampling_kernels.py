"""Greedy verification: the lowest of the best ids, and the prefix of drafts that the target confirms."""

import pytest
import torch

from mambalign.kernels.sampling import (
    NO_BEST,
    accept_drafts,
    accept_drafts_on_gpu,
    accept_drafts_reference,
    argmax_rows,
    argmax_rows_on_gpu,
    argmax_rows_reference,
)


@pytest.mark.parametrize("num_columns", [1, 5, 64, 100, 129, 700])
def test_argmax_rows(num_columns: int, device: str) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    logits = torch.randint(-9, 10, (11, num_columns), generator=generator).float()  # ties everywhere
    logits[3], logits[4], logits[5] = float("-inf"), float("nan"), float("inf")
    logits[6, num_columns // 2], logits[7, -1] = float("nan"), float("inf")
    logits[8] = -1.0
    logits[9, ::2], logits[9, -1] = float("-inf"), 1.0
    want = [row.index(max(row)) for row in logits.tolist()]
    want[3:8] = [NO_BEST.value] * 5
    assert argmax_rows_reference(logits).tolist() == want
    assert argmax_rows(logits.to(device)).tolist() == want
    for split, block in ((64, 16), (128, 128), (1024, 32)):
        assert argmax_rows_on_gpu(logits.to(device), split, block).tolist() == want
        assert argmax_rows_on_gpu(logits[2:3].to(device), split, block).tolist() == want[2:3]


def test_argmax_rows_refuses_what_it_would_misread(device: str) -> None:
    assert argmax_rows_on_gpu(torch.empty(0, 7, device=device)).shape == (0,)
    for logits in (torch.zeros(4, 6, device=device).t(), torch.zeros(2, 3, device=device).double()):
        with pytest.raises(ValueError, match="contiguous fp32"):
            argmax_rows_on_gpu(logits)


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7, 8])
def test_accept_drafts(num_drafts: int, device: str) -> None:
    generator = torch.Generator().manual_seed(num_drafts)
    num_rows = 60
    target = torch.randint(0, 2, (num_rows, num_drafts + 1), generator=generator) + (1 << 40)
    drafts = torch.where(torch.rand(num_rows, num_drafts, generator=generator) < 0.8, target[:, :-1], 7)
    query_len = torch.randint(0, num_drafts + 2, (num_rows,), generator=generator, dtype=torch.int32)
    drafts[0], query_len[0] = target[0, :-1], num_drafts + 1
    want = []
    for row in range(num_rows):
        kept = 0
        while kept < query_len[row] and (kept == 0 or drafts[row, kept - 1] == target[row, kept - 1]):
            kept += 1
        want.append(kept)
    for function in (accept_drafts, accept_drafts_reference, accept_drafts_on_gpu):
        kept = function(target.to(device), drafts.to(device), query_len.to(device))
        assert kept.dtype == torch.int32 and kept.tolist() == want
    assert {0, 1, num_drafts + 1} <= set(want)


def test_accept_drafts_refuses_shapes_that_do_not_fit(device: str) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="targets"):
        accept_drafts_on_gpu(ids, ids, torch.ones(2, dtype=torch.int32, device=device))
