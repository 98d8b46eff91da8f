"""A gate on a value: the formula, the kernel, and bits that do not depend on a row's batch."""

import pytest
import torch
import torch.nn.functional as F

from mambalign.kernels.gate_mul import GATES, gate_mul, gate_mul_on_gpu
from mambalign.kernels.tolerances import tolerance

FORMULAS = {"silu": F.silu, "gelu": F.gelu}


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 63, 1104])
def test_reference_and_kernel_are_the_formula(
    width: int, dtype: torch.dtype, x_dtype: torch.dtype, activation: str, device: str
) -> None:
    both = torch.randn(5, 2 * width, generator=torch.Generator().manual_seed(width))
    gate, x = both[:, :width].to(dtype), both.to(x_dtype)[:, width:]  # rows of x lie apart
    for options in ((1.0, 1.0, activation), (0.75, 3.5, activation)):
        want = (FORMULAS[activation](gate.double() * options[0]) * x.double() * options[1]).to(dtype)
        torch.testing.assert_close(gate_mul(gate, x, *options), want, **tolerance("kernel", dtype))
        on_device = gate.to(device), both.to(device, x_dtype)[:, width:]
        got = gate_mul_on_gpu(*on_device, *options)
        torch.testing.assert_close(got.cpu(), want, **tolerance("kernel", dtype))
        assert got.is_contiguous() and got.dtype == dtype
        for run, (some_gate, some_x) in ((gate_mul, (gate, x)), (gate_mul_on_gpu, on_device)):
            whole = run(some_gate, some_x, *options)
            for row in range(5):
                alone = run(some_gate[row : row + 1], some_x[row : row + 1], *options)
                assert torch.equal(alone, whole[row : row + 1])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a gate"):
        gate_mul(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="a gate"):
        gate_mul(torch.ones(2, 2), torch.ones(2, 2).t())
    with pytest.raises(ValueError, match="'tanh'"):
        gate_mul(torch.ones(2, 2), torch.ones(2, 2), activation="tanh")
