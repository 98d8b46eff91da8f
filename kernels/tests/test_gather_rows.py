"""gather_rows: the chosen rows, whatever lies between rows and between indices; row 0 for an index that is missing."""

import pytest
import torch

from mambalign.kernels.gather_rows import gather_rows_on_gpu, gather_rows_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 63, 1024, 1500])
@pytest.mark.parametrize("run", [gather_rows_on_gpu, gather_rows_reference])
def test_rows_come_from_where_the_index_says(device: str, dtype: torch.dtype, width: int, run) -> None:
    source = torch.randn(5, width + 7, device=device, dtype=dtype)[:, :width]
    indices = torch.tensor([[3, 9], [-1, 9], [4, 9], [0, 9], [4, 9]], device=device)
    got = run(source, indices[:, 0])
    assert got.is_contiguous() and torch.equal(got, torch.stack([source[i] for i in (3, 0, 4, 0, 4)]))
    assert run(source, indices[:0, 0]).shape == (0, width)
