"""scatter_rows: the chosen rows arrive, a negative index skips, nothing else is touched."""

import pytest
import torch

from mambalign.kernels.scatter_rows import scatter_rows_on_gpu, scatter_rows_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 63, 1024, 1500])
@pytest.mark.parametrize("run", [scatter_rows_on_gpu, scatter_rows_reference])
def test_rows_go_where_the_index_says(device: str, dtype: torch.dtype, width: int, run) -> None:
    wide = torch.randn(5, width + 7, device=device, dtype=dtype)
    source = wide[:, :width]  # rows apart
    dest = torch.full((9, width), torch.nan, device=device, dtype=dtype)
    index = torch.tensor([3, -1, 8, 0, -1], device=device, dtype=torch.int32)
    run(source, dest, index)
    want = torch.full_like(dest, torch.nan)
    for row, place in enumerate(index.tolist()):
        if place >= 0:
            want[place] = source[row]
    assert torch.equal(dest.nan_to_num(7.0), want.nan_to_num(7.0))
