"""RMS norms: values of the formula, and a row's bits whatever rows stand beside it."""

import pytest
import torch
import torch.nn.functional as F

from mambalign.kernels.rms_norm import (
    PIECE,
    add_rms_norm,
    norm_adds_segments,
    rms_norm,
    rms_norm_gated,
    rms_norm_gated_on_gpu,
    rms_norm_on_gpu,
    rms_norm_then_gate,
    rms_norm_then_gate_on_gpu,
)
from mambalign.kernels.tolerances import tolerance

EPS = 1e-5
WIDTHS = [1, 7, 63, 256, 600]
DTYPES = [torch.float32, torch.bfloat16]
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter does not round to bfloat16


def rows(num_rows: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 7, (num_rows, width), generator=generator)
    return torch.randn(num_rows, width, generator=generator).ldexp(exponents)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = rows(300, width, 0).to(dtype), rows(1, width, 1)[0]
    whole = rms_norm(x, weight, EPS)
    x64 = x.double()
    want = weight * x64 * (x64.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    torch.testing.assert_close(whole, want.to(dtype), **tolerance("kernel", dtype))
    for first, count in ((0, 1), (0, 2), (5, 1), (7, 63), (1, 299), (299, 1)):
        assert torch.equal(rms_norm(x[first : first + count], weight, EPS), whole[first : first + count])
    side = torch.zeros(300, 2 * width, dtype=dtype)[:, width:]
    assert rms_norm(x, weight, EPS, side) is side and torch.equal(side, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_groups", "width"), [(1, 63), (2, 512), (3, 60), (4, 840)])
def test_rms_norm_gated(num_groups: int, width: int, dtype: torch.dtype) -> None:
    num_rows = PIECE + 40
    x, weight = rows(num_rows, width, 0), rows(1, width, 1)[0]
    gate = torch.cat([rows(num_rows, width, 2), rows(num_rows, 5, 3)], dim=1).to(dtype)[:, :width]  # strided
    whole = rms_norm_gated(x, gate, weight, EPS, width // num_groups)
    gated = (x.double() * F.silu(gate.double())).view(num_rows, num_groups, -1)
    want = weight * (gated * (gated.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()).view(num_rows, width)
    torch.testing.assert_close(whole, want.to(dtype), **tolerance("kernel", dtype))
    for first, count in ((0, 1), (3, 2), (7, 63), (40, PIECE), (num_rows - 1, 1)):
        part = slice(first, first + count)
        assert torch.equal(rms_norm_gated(x[part], gate[part], weight, EPS, width // num_groups), whole[part])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("width", [7, 256, 600])
def test_a_norm_that_adds_segments_has_the_bits_of_one_given_their_sum(
    width: int, dtype: torch.dtype, device: str
) -> None:
    sums = rows(4 * 9, width, 2).view(4, 9, width).to(device)
    residual, weight = rows(9, width, 3).to(dtype).to(device), rows(1, width, 1)[0].to(device)
    total = torch.zeros_like(sums[0])
    for part in sums:
        total += part
    for count in (9, 5):
        got = rms_norm_on_gpu(sums[:, :count], residual[:count], weight, EPS)
        want = rms_norm_on_gpu(total[:count].to(dtype), residual[:count], weight, EPS)
        assert all(map(torch.equal, got, want)) and got[0].dtype == dtype
    assert norm_adds_segments(4, width, dtype, torch.device(device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_gives_the_bits_of_its_two_steps(dtype: torch.dtype) -> None:
    x, residual, weight = rows(9, 63, 0).to(dtype), rows(9, 63, 1).to(dtype), rows(1, 63, 2)[0]
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_of_rms_norm(width: int, dtype: torch.dtype, device: str) -> None:
    x, residual, weight = rows(12, width, 0).to(dtype), rows(12, width, 1).to(dtype), rows(1, width, 2)[0]
    wide = torch.cat([x, residual, rows(12, 5, 3).to(dtype)], dim=1).to(device)  # views whose rows are apart
    x_view, residual_view = wide[:, :width], wide[:, width : 2 * width]
    total, want = x + residual, rms_norm(x + residual, weight, EPS)
    x, residual, total, weight = x.to(device), residual.to(device), total.to(device), weight.to(device)
    normed, summed = rms_norm_on_gpu(x, residual, weight, EPS)
    assert torch.equal(summed, total)
    torch.testing.assert_close(normed.cpu(), want, **tolerance("kernel", DTYPES[dtype == HALF]))
    assert torch.equal(rms_norm_on_gpu(total, None, weight, EPS)[0], normed)
    assert all(map(torch.equal, rms_norm_on_gpu(x_view, residual_view, weight, EPS), (normed, total)))
    for first, count in ((0, 1), (5, 7), (11, 1)):
        part = slice(first, first + count)
        assert torch.equal(rms_norm_on_gpu(x[part], residual[part], weight, EPS)[0], normed[part])
    assert rms_norm_on_gpu(x[:0], None, weight, EPS)[0].shape == (0, width)
    sides = torch.full((len(x), 3 * width), 7.0, dtype=dtype, device=device)
    for out in (sides[:, width : 2 * width], sides[:, 2 * width :]):  # beside each other, aligned or not
        assert rms_norm_on_gpu(total, None, weight, EPS, out)[0].data_ptr() == out.data_ptr()
        assert torch.equal(out, normed)
    assert (sides[:, :width] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_groups", "width"), [(1, 63), (2, 512), (3, 60)])
def test_the_kernel_of_rms_norm_gated(num_groups: int, width: int, dtype: torch.dtype, device: str) -> None:
    x, weight = rows(12, width, 0), rows(1, width, 1)[0]
    wide = torch.cat([rows(12, width, 2), rows(12, 8, 3)], dim=1).to(dtype)
    want = rms_norm_gated(x, wide[:, :width], weight, EPS, width // num_groups)
    x, weight, gate = x.to(device), weight.to(device), wide.to(device)[:, :width]
    whole = rms_norm_gated_on_gpu(x, gate, weight, EPS, width // num_groups)
    torch.testing.assert_close(whole.cpu(), want, **tolerance("kernel", dtype))
    assert torch.equal(rms_norm_gated_on_gpu(x, gate.contiguous(), weight, EPS, width // num_groups), whole)
    for first, count in ((0, 1), (5, 7), (11, 1)):
        part = slice(first, first + count)
        assert torch.equal(rms_norm_gated_on_gpu(x[part], gate[part], weight, EPS, width // num_groups), whole[part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "width"), [(1, 63), (3, 20), (2, 128), (13, 128), (33, 40)])
def test_rms_norm_then_gate_and_its_kernel(num_heads: int, width: int, dtype: torch.dtype, device: str) -> None:
    x, weight = rows(12, num_heads * width, 0).view(12, num_heads, width), rows(1, width, 1)[0]
    wide = torch.cat([rows(12, num_heads * width, 2), rows(12, 8, 3)], dim=1).to(dtype)
    gate = wide[:, : num_heads * width]
    x64, gate64 = x.double(), gate.double()
    normed = weight * x64 * (x64.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    want = (normed.flatten(1) * F.silu(gate64)).to(dtype)
    on_device = x.to(device), wide.to(device)[:, : num_heads * width], weight.to(device)
    cases = ((rms_norm_then_gate, (x, gate, weight)), (rms_norm_then_gate_on_gpu, on_device))
    for run, (some_x, some_gate, some_weight) in cases:
        whole = run(some_x, some_gate, some_weight, EPS)
        torch.testing.assert_close(whole.cpu(), want, **tolerance("kernel", dtype))
        assert torch.equal(run(some_x, some_gate.contiguous(), some_weight, EPS), whole)
        for first, count in ((0, 1), (5, 7), (11, 1)):
            part = slice(first, first + count)
            assert torch.equal(run(some_x[part], some_gate[part], some_weight, EPS), whole[part])
