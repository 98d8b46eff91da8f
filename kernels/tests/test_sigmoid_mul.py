"""An output gate: the formula, and bits that do not depend on a row's batch."""

import pytest
import torch

from mambalign.kernels.sigmoid_mul import sigmoid_mul
from mambalign.kernels.tolerances import tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 63, 1104])
def test_the_formula(width: int, dtype: torch.dtype) -> None:
    x, wide = torch.randn(2, 5, 2 * width, generator=torch.Generator().manual_seed(width)).to(dtype)
    x, gate = x[:, :width].contiguous(), wide[:, width:]  # rows of the gate lie apart
    got = sigmoid_mul(x, gate)
    torch.testing.assert_close(got, (x.double() * gate.double().sigmoid()).to(dtype), **tolerance("kernel", dtype))
    assert got.is_contiguous()
    for row in range(5):
        assert torch.equal(sigmoid_mul(x[row : row + 1], gate[row : row + 1]), got[row : row + 1])
