"""An output gate: the formula, the kernel, and bits that do not depend on a row's batch."""

import pytest
import torch

from mambalign.kernels.sigmoid_mul import sigmoid_mul, sigmoid_mul_on_gpu
from mambalign.kernels.tolerances import tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 63, 1104])
def test_reference_and_kernel_are_the_formula(width: int, dtype: torch.dtype, device: str) -> None:
    x, wide = torch.randn(2, 5, 2 * width, generator=torch.Generator().manual_seed(width)).to(dtype)
    x = x[:, :width].contiguous()
    want = (x.double() * wide[:, width:].double().sigmoid()).to(dtype)
    for run, where in ((sigmoid_mul, "cpu"), (sigmoid_mul_on_gpu, device)):
        some_x, gate = x.to(where), wide.to(where)[:, width:]  # rows of the gate lie apart
        got = run(some_x, gate)
        torch.testing.assert_close(got.cpu(), want, **tolerance("kernel", dtype))
        for row in range(5):
            assert torch.equal(run(some_x[row : row + 1], gate[row : row + 1]), got[row : row + 1])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a gate"):
        sigmoid_mul(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="a gate"):
        sigmoid_mul(torch.ones(2, 2), torch.ones(2, 2).t())
