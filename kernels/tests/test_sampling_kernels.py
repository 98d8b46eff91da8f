"""The lowest of the best ids."""

import pytest
import torch

from mambalign.kernels.sampling import NO_BEST, argmax_rows, argmax_rows_on_gpu, argmax_rows_reference


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
        assert argmax_rows_on_gpu(logits.to(device), split=split, block=block).tolist() == want
        assert argmax_rows_on_gpu(logits[2:3].to(device), split=split, block=block).tolist() == want[2:3]
    for run in (argmax_rows_on_gpu, argmax_rows):
        columns = torch.full((len(logits), 3), -7, device=device)
        run(logits.to(device), columns[:, 1])
        assert columns.tolist() == [[-7, token, -7] for token in want]


def test_argmax_rows_refuses_what_it_would_misread(device: str) -> None:
    assert argmax_rows_on_gpu(torch.empty(0, 7, device=device)).shape == (0,)
    for logits in (torch.zeros(4, 6, device=device).t(), torch.zeros(2, 3, device=device).double()):
        with pytest.raises(ValueError, match="contiguous fp32"):
            argmax_rows_on_gpu(logits)
