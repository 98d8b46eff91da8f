"""The GPU's linear layer: its order of addition, whatever the tiles, the split and the number of rows.

Compiled on a GPU. The interpreter adds a tile's products in numpy's order, so what must be equal there has one
product that is not zero in each tile; between tiles and segments the order is the kernel's own. Its dot reads bfloat16
as integers: there, half precision stands in.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mambalign.kernels.activation import relu2
from mambalign.kernels.linear_tiles import Tiles, segments_of, tiles_for
from mambalign.kernels.linear_triton import linear_on_gpu, merge_segments, segment_sums
from mambalign.kernels.tolerances import tolerance

HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
DTYPES = [torch.float32, HALF]
WIDEST_K = 32  # of a tile in these tests
TILES = [
    Tiles(16, 16, 32, 4, 2),
    Tiles(16, 32, 32, 4, 2, True),
    Tiles(32, 64, 16, 4, 2, True),
    Tiles(64, 64, 32, 4, 3),
    Tiles(16, 32, 32, 4, 2, split=True, tma=True),
    Tiles(64, 32, 32, 4, 2, tma=True),
]
CASES = [
    (1000, 37, (4, 256)),
    (1000, 40, (4, 256)),  # the copy engine fetches past the end of K
    (1024, 16, (4, 256)),
    (600, 1, (3, 256)),
    (90, 64, (1, 90)),
    (104, 64, (1, 104)),
    (7, 5, (1, 7)),
]
SHAPES_8B = [(4096, 18560), (8192, 4096), (4096, 21504), (21504, 4096), (4096, 6144), (4096, 4096), (4096, 131072)]


def sparse(num_rows: int, k: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """One value in every `WIDEST_K`, exponents spread, later ones cancelling earlier ones: sums round in any order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(num_rows, k)
    places = torch.arange(0, k, WIDEST_K)
    x[:, places] = torch.randn(num_rows, len(places), generator=generator)
    x[:, places] *= torch.exp2(torch.randint(-4, 5, (num_rows, len(places)), generator=generator).float())
    return x.to(dtype)


def by_segments(x: torch.Tensor, weight: torch.Tensor, segments: tuple[int, int]) -> torch.Tensor:
    """The order of addition, one product after another. fp32 [M, N]."""
    num_segments, length = segments
    total = torch.zeros(len(x), weight.shape[1])
    for i in range(num_segments):
        part = torch.zeros_like(total)
        for k in range(i * length, min((i + 1) * length, x.shape[1]), WIDEST_K):
            part += x[:, k : k + 1].float() * weight[k].float()
        total += part
    return total


@pytest.mark.parametrize(("k", "n", "segments"), CASES)
def test_every_tile_adds_in_the_order_of_the_segments(k: int, n: int, segments: tuple[int, int], device: str) -> None:
    num_rows = 40
    x = sparse(num_rows, k, k, HALF)
    weight = torch.randn(k, n, generator=torch.Generator().manual_seed(n)).to(HALF)
    want = by_segments(x, weight, segments)
    assert segments[0] == 1 or not torch.equal(want, by_segments(x, weight, (1, k)))  # the data tell orders apart
    x, weight = x.to(device), weight.to(device)
    if device == "cuda":  # a tensor core does not round each sum to the nearest
        oracle, want = want, linear_on_gpu(x, weight, out_dtype=torch.float32, tiles=TILES[0], segments=segments).cpu()
        torch.testing.assert_close(want, oracle, atol=1e-3, rtol=1e-4)
    for tiles in TILES:
        for first, count in ((0, num_rows), (3, 1), (20, 17)):
            rows = x[first : first + count]
            got = linear_on_gpu(rows, weight, out_dtype=torch.float32, tiles=tiles, segments=segments)
            assert torch.equal(got.cpu(), want[first : first + count]), (tiles, first, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (37, 53), (256, 130), (2100, 24)])
def test_values(k: int, n: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(19, k, generator=generator).to(dtype)
    weight = (torch.randn(k, n, generator=generator) / k**0.5).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    want = x.double() @ weight.double() + bias.double()
    x, weight, bias = x.to(device), weight.to(device), bias.to(device)
    for num_rows in (19, 1):
        got = linear_on_gpu(x[:num_rows], weight, bias)
        torch.testing.assert_close(
            got.cpu(),
            want[:num_rows].to(dtype),
            **tolerance("kernel", torch.float32 if dtype == torch.float32 else torch.bfloat16),
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_activation_round_where_separate_steps_would(dtype: torch.dtype, device: str) -> None:
    x, weight, bias = sparse(21, 128, 0, dtype), torch.randn(128, 40).to(dtype), torch.randn(40).to(dtype)
    x, weight, bias = x.to(device), weight.to(device), bias.to(device)
    plain = linear_on_gpu(x, weight)
    assert torch.equal(linear_on_gpu(x, weight, bias), plain + bias)
    assert torch.equal(linear_on_gpu(x, weight, relu2=True), relu2(plain))
    assert torch.equal(linear_on_gpu(x, weight, bias, relu2=True), relu2(plain + bias))
    assert torch.equal(linear_on_gpu(x, weight, out_dtype=torch.float32).to(dtype), plain)


def test_segments_are_merged_in_order_as_a_product_would_be(device: str) -> None:
    sums = sparse(4 * 6, 40, 1, torch.float32).view(4, 6, 40).to(device)
    bias = torch.randn(40).to(HALF).to(device)
    total = torch.zeros_like(sums[0])
    for part in sums:
        total += part
    assert not torch.equal(total, sums.flip(0).sum(0))  # the data tell orders apart
    assert torch.equal(merge_segments(sums, None, torch.float32), total)
    for count in (6, 4):  # rows of a longer product
        merged = merge_segments(sums[:, :count], bias, HALF, relu2=True)
        assert torch.equal(merged, relu2(total[:count].to(HALF) + bias))
    x, weight, segments = sparse(5, 1000, 0, HALF).to(device), torch.randn(1000, 37).to(HALF).to(device), (4, 256)
    tiles = Tiles(16, 32, 32, 4, 2, split=True)
    parts = segment_sums(x, weight, tiles, segments)
    assert parts.shape == (4, 5, 37)
    want = linear_on_gpu(x, weight, out_dtype=torch.float32, tiles=tiles._replace(split=False), segments=segments)
    assert torch.equal(merge_segments(parts, None, torch.float32), want)


@pytest.mark.parametrize("k", [64, 72])
def test_rows_apart_and_off_a_word_give_the_bits_of_contiguous_ones(k: int, device: str) -> None:
    x, weight = sparse(9, k, 0, HALF).to(device), torch.randn(k, 48).to(HALF).to(device)
    want = linear_on_gpu(x, weight)
    assert want.isfinite().all()
    for beside in (64, 8, 3):
        other = x.new_full((9, beside), float("nan"))
        assert torch.equal(linear_on_gpu(torch.cat([other, x], dim=1)[:, beside:], weight), want)
        assert torch.equal(linear_on_gpu(torch.cat([x, other], dim=1)[:, :k], weight), want)


def test_no_rows_and_bad_weights(device: str) -> None:
    weight = torch.randn(8, 8, device=device)
    assert linear_on_gpu(torch.empty(0, 8, device=device), weight).shape == (0, 8)
    with pytest.raises(ValueError, match="contiguous"):
        linear_on_gpu(torch.empty(2, 8, device=device), weight.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "n"), [*SHAPES_8B, (256, 1288), (1, 1), (37, 53)])
def test_segments_follow_the_weight_and_fit_every_tile(k: int, n: int, dtype: torch.dtype) -> None:
    num_segments, length = segments_of(k, n)
    assert (num_segments - 1) * length < k <= num_segments * length
    for num_rows in (1, 16, 17, 33, 65, 129, 257, 513, 8192):
        tiles = tiles_for(num_rows, k, n, dtype)
        assert num_segments == 1 or length % tiles.block_k == 0
        assert tiles_for(num_rows, k, n, dtype, one_family=True).block_m >= 64


def test_kernels_compile_for_a_gpu() -> None:
    """In a process of its own, without the interpreter."""
    script = Path(__file__).with_name("compile_for_sm90.py")
    answer = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500)
    assert answer.returncode == 0, answer.stderr[-2000:]
    compiled = json.loads(answer.stdout)
    assert not compiled["failed"]
    of_drafts = [each for name, each in compiled["kernels"].items() if name.startswith("draft scores")]
    assert of_drafts and all(each["wgmma"] for each in of_drafts)  # fp8 in tensor cores, not widened before
