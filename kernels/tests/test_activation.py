"""Activations: right, and the operations that the references rest on do not see an element's place."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from mambalign.kernels.activation import activation_on_gpu, relu2, silu, softplus
from mambalign.kernels.tolerances import tolerance

# What the kernels' references use where a token's place in its tensor changes with the batch.
PLACE_FREE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "erf": torch.erf,
    "log1p": lambda x: torch.log1p(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "division": lambda x: x / (x.abs() + 3.0),
    "square": lambda x: x.pow(2),
    "fused multiply-add": lambda x: torch.addcmul(x.flip(0).contiguous().flip(0), x, x + 0.3),
    "silu": silu,
    "softplus": softplus,
    "relu2": relu2,
}


def wide(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, generator=generator).ldexp(torch.randint(-6, 7, (count,), generator=generator))


@pytest.mark.parametrize("name", PLACE_FREE)
def test_an_element_gives_the_same_bits_at_any_place(name: str) -> None:
    function, x = PLACE_FREE[name], wide(70_001)  # enough elements for several threads
    whole = function(x)
    for first in range(40):  # every place in a vector register, and its scalar tail
        for count in (1, 2, 7, 15, 16, 17, 33, 40_000):
            part = x[first : first + count].clone()
            assert torch.equal(function(part), whole[first : first + count]), (first, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-30, 30, 1001), torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])]).to(dtype)
    x64 = x.double()
    torch.testing.assert_close(silu(x), F.silu(x64).to(dtype), **tolerance("kernel", dtype))
    torch.testing.assert_close(softplus(x), F.softplus(x64).float(), **tolerance("kernel", torch.float32))
    torch.testing.assert_close(relu2(x), F.relu(x64).square().to(dtype), **tolerance("kernel", dtype))
    assert silu(x).dtype == relu2(x).dtype == dtype
    assert softplus(x).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel(dtype: torch.dtype, device: str) -> None:
    x = torch.cat([wide(2100), torch.tensor([-1e4, -0.0, 0.0, 1e4])]).to(dtype)
    on_device = x.to(device)
    got = activation_on_gpu(on_device, relu2=False)
    torch.testing.assert_close(got.cpu(), silu(x), **tolerance("kernel", dtype))
    assert torch.equal(activation_on_gpu(on_device[7:1200], relu2=False), got[7:1200])
    torch.testing.assert_close(activation_on_gpu(on_device, relu2=True).cpu(), relu2(x), **tolerance("kernel", dtype))
    assert activation_on_gpu(on_device.view(2, -1).t(), relu2=True).shape == (1052, 2)
