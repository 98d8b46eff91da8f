"""Linear layers: right, and batch-invariant on values that show a changed order of addition."""

import pytest
import torch

from mambalign.kernels import linear as module
from mambalign.kernels.activation import relu2, silu
from mambalign.kernels.linear import BLOCK_ROWS, MAX_ROWS, check_linear_invariance, linear, linear_for_sum
from mambalign.kernels.rms_norm import add_rms_norm
from mambalign.kernels.tolerances import tolerance

SHAPES = [(256, 1288), (512, 256), (832, 256), (256, 4096), (1, 1), (37, 53), (63, 7), (513, 100), (1100, 30)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def forget_failed_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run_by_blocks", set())


def spread(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values times powers of two from 2^-12 to 2^12."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).ldexp(torch.randint(-12, 13, shape, generator=generator))


def cancelling(num_rows: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and a weight whose second half of K nearly cancels the first."""
    x, weight, half = spread(num_rows, k), spread(k, n, seed=1), k // 2
    x[:, half : 2 * half] = -x[:, :half] * (1 + 1e-3 * torch.rand(half))
    weight[half : 2 * half] = weight[:half]
    return x.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_a_row_gives_the_same_bits_in_any_batch(k: int, n: int, dtype: torch.dtype) -> None:
    x, weight = cancelling(MAX_ROWS + 130, k, n, dtype)
    check_linear_invariance([weight])
    want = linear(x, weight)
    for num_rows in (1, 2, 3, 5, 8, 9, 31, 64, 100, 257, MAX_ROWS, MAX_ROWS + 1, MAX_ROWS + 2):
        for first in (0, 1, 3, x.shape[0] - num_rows):
            assert torch.equal(linear(x[first : first + num_rows], weight), want[first : first + num_rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_values(k: int, n: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(33, k, generator=generator).to(dtype)
    weight = (torch.randn(k, n, generator=generator) / k**0.5).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    want = (x.double() @ weight.double() + bias.double()).to(dtype)
    torch.testing.assert_close(linear(x, weight, bias), want, **tolerance("kernel", dtype))


def test_no_rows() -> None:
    assert linear(torch.empty(0, 8), torch.randn(8, 5)).shape == (0, 5)


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_a_strided_input_gives_the_bits_of_a_contiguous_one(k: int, n: int) -> None:
    x, weight = cancelling(40, k, n, torch.float32)
    beside = torch.cat([x, x], dim=1)[:, k:]
    for num_rows in (1, 2, 3, 40):
        assert torch.equal(linear(beside[:num_rows], weight), linear(x[:num_rows], weight))


def test_a_shape_that_fails_is_run_in_blocks_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library that rounds by the number of rows; only blocks of one fixed size escape it."""
    library = torch.mm

    def mm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        product = library(x, weight) * (1 + 2.0**-20 * x.shape[0])
        return product if out is None else out.copy_(product)

    monkeypatch.setattr(module.torch, "mm", mm)
    weight = torch.randn(16, 8)
    assert check_linear_invariance([weight, weight]) == [(16, 8, torch.float32)]
    assert f"blocks of {BLOCK_ROWS} rows" in caplog.text
    x = torch.randn(21, 16)
    whole = linear(x, weight)
    assert all(torch.equal(linear(x[i : i + 1], weight), whole[i : i + 1]) for i in range(21))


def test_a_library_without_any_invariant_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.mm
    calls = iter(range(10**6))

    def mm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        product = library(x, weight) + next(calls)
        return product if out is None else out.copy_(product)

    monkeypatch.setattr(module.torch, "mm", mm)
    with pytest.raises(RuntimeError, match="no batch-invariant way"):
        check_linear_invariance([torch.randn(16, 8)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_activation_and_fp32_results_are_separate_steps(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(9, 32).to(dtype), torch.randn(32, 24).to(dtype), torch.randn(24).to(dtype)
    want = relu2(linear(x, weight) + bias)
    assert torch.equal(linear(x, weight, bias, activation="relu2"), want)
    widened = linear(x, weight, out_dtype=torch.float32)
    assert widened.dtype == torch.float32 and torch.equal(widened, linear(x, weight).float())


def test_row_counts_of_the_library_are_padded_by_an_eighth_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(64, 32, dtype=torch.bfloat16)
    monkeypatch.setattr(module, "_library_rows", {((64, 32, torch.bfloat16), torch.bfloat16): {2048, 512}})
    x = torch.zeros(2050, 64, dtype=torch.bfloat16)
    counts = {
        rows: module._library_row_count(x[:rows], weight, x.dtype) for rows in (1, 448, 456, 512, 513, 2000, 2049)
    }
    assert counts == {1: 0, 448: 0, 456: 512, 512: 512, 513: 0, 2000: 2048, 2049: 0}
    assert module._library_row_count(x[:512], x.new_zeros(64, 33), x.dtype) == 0
    assert module._library_row_count(x[:512], weight, torch.float32) == 0
    off_a_word, apart = x.view(-1)[1 : 1 + 512 * 64].view(512, 64), x[:512, :32]
    assert module._library_row_count(off_a_word, weight, x.dtype) == 0
    assert module._library_row_count(apart, weight, x.dtype) == 0
    padded = module._pad_rows(torch.ones(3, 2), 5)
    assert padded.sum() == 6 and padded.shape == (5, 2)


def test_a_shape_whose_narrow_tiles_differ_on_a_gpu_uses_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x, weight, out_dtype, tiles, segments):
        return x * weight * (1 + 2.0**-20 * (tiles.block_m < 64))

    monkeypatch.setattr(module, "linear_on_gpu", kernel)
    shape, cpu = (1, 5, torch.float32), torch.device("cpu")
    assert not module._is_invariant_on_gpu(*shape, cpu)
    module._run_by_blocks.add(shape)
    assert module._is_invariant_on_gpu(*shape, cpu)


def test_the_library_serves_where_its_bits_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_rows = []

    def kernel(x, weight, bias=None, **options):
        kernel_rows.append(len(x))
        return torch.mm(x, weight) * (1 + (len(x) == 1024))

    monkeypatch.setattr(module, "linear_on_gpu", kernel)
    monkeypatch.setattr(module, "_replayed", lambda run: run() + (len(run()) == 192))
    monkeypatch.setattr(module, "MAX_LIBRARY_BYTES", 4096 * 16 * 2)
    weight, bias = torch.randn(8, 16).bfloat16(), torch.randn(16).bfloat16()
    shape, cpu = (8, 16), torch.device("cpu")
    assert module._equal_library_rows(*shape, torch.bfloat16, torch.bfloat16, cpu) == {
        96,
        128,
        256,
        384,
        512,
        2048,
        4096,
    }
    assert module._equal_library_rows(*shape, torch.float32, torch.float32, cpu) == set()
    monkeypatch.setattr(module, "_library_rows", {((8, 16, torch.bfloat16), torch.bfloat16): {256, 512}})
    kernel_rows.clear()
    x = torch.randn(500, 8).bfloat16()
    got = module._linear_on_gpu(x, weight, bias, "silu", None)
    assert not kernel_rows and torch.equal(got, silu(torch.mm(x, weight) + bias))
    squared = module._linear_on_gpu(x[:250], weight, bias, "relu2", None)
    assert not kernel_rows and torch.equal(squared, relu2(torch.mm(x[:250], weight) + bias))
    for num_rows, activation, out_dtype in ((500, None, torch.float32), (20, None, None), (500, "relu2", None)):
        module._linear_on_gpu(x[:num_rows], weight, bias, activation, out_dtype)
    module._linear_on_gpu(torch.randn(500, 9).bfloat16()[:, :8], weight, bias, None, None)  # rows apart
    assert kernel_rows == [500, 20, 500, 500]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("k", "n"), [(4096, 18560), (4096, 4096), (21504, 4096), (256, 1288), (37, 53)])
def test_on_a_gpu_a_row_gives_the_same_bits_in_any_batch(k: int, n: int, dtype: torch.dtype) -> None:
    """Kernel and library alike, before and after a capture."""
    x, weight = (tensor.cuda() for tensor in cancelling(600, k, n, dtype))
    assert check_linear_invariance([weight]) == []
    want, sums = linear(x, weight), linear(x, weight, out_dtype=torch.float32)
    for in_fp32 in ([], [weight]):
        assert check_linear_invariance([weight], in_fp32) == []
        for num_rows in (1, 2, 16, 33, 100, 128, 200, 256, 512):
            for first in (0, 1, 600 - num_rows):
                rows = slice(first, first + num_rows)
                assert torch.equal(linear(x[rows], weight), want[rows])
                assert torch.equal(linear(x[rows], weight, out_dtype=torch.float32), sums[rows])
    for num_rows in (4, 128, 256):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = linear(x[:num_rows], weight)
        for _ in range(3):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, want[:num_rows])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("k", "n"), [(8192, 4096), (4096, 18560), (12288, 4096)])
def test_on_a_gpu_a_norm_of_segments_is_a_norm_of_the_product(k: int, n: int) -> None:
    """Kernel and library alike, whoever adds the segments."""
    x, weight = (tensor.cuda() for tensor in cancelling(600, k, n, torch.bfloat16))
    check_linear_invariance([weight])
    residual, norm = torch.randn(600, n, dtype=x.dtype, device="cuda"), torch.rand(n, device="cuda")
    product = linear(x, weight)
    want = add_rms_norm(product, residual, norm, 1e-5)
    for num_rows in (1, 4, 17, 33, 64, 100, 120, 128, 200, 256, 512):
        got = add_rms_norm(linear_for_sum(x[:num_rows], weight), residual[:num_rows], norm, 1e-5)
        assert torch.equal(linear(x[:num_rows], weight), product[:num_rows])
        assert all(torch.equal(a, b[:num_rows]) for a, b in zip(got, want, strict=True))
    assert (linear_for_sum(x[:4], weight).dim() == 3) == (n < 16384)
