"""The drafter's head: its copy is near the head, and its best token is the lowest of the best.

Compared where both are exact: values of few bits, whose sums no order of addition rounds.
"""

import pytest
import torch

from mambalign.kernels.draft_head import (
    FP8,
    QUANTIZED_AT_ONCE,
    DraftHead,
    draft_head_bytes,
    draft_tokens,
    draft_tokens_reference,
    draft_tokens_triton,
    padded_width,
    quantize_head,
)
from mambalign.kernels.linear_tiles import Tiles
from mambalign.kernels.sampling import NO_BEST

TILES = [
    None,  # those of the number of rows
    Tiles(16, 64, 64, 4, 2),
    Tiles(64, 256, 32, 4, 3),
]


def exact_head(vocab_size: int, hidden_size: int, generator: torch.Generator) -> DraftHead:
    """Weights of -1, 0 and 1 and scales of 1/2, 1 and 2: scores of a few hundred values, ties everywhere."""
    weight = torch.zeros(vocab_size, padded_width(hidden_size))
    weight[:, :hidden_size] = torch.randint(-1, 2, (vocab_size, hidden_size), generator=generator)
    return DraftHead(weight.to(FP8), 2.0 ** torch.randint(-1, 2, (vocab_size,), generator=generator))


def exact_rows(num_rows: int, hidden_size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-1, 2, (num_rows, hidden_size), generator=generator).to(torch.float16)


def to(device: str, head: DraftHead) -> DraftHead:
    return DraftHead(*(each.to(device) for each in head))


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "hidden_size"), [(1, 1, 16), (5, 100, 37), (19, 300, 256), (70, 129, 80), (130, 65, 16)]
)
def test_the_lowest_of_the_best_tokens(num_rows: int, vocab_size: int, hidden_size: int, device: str) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    head, hidden = exact_head(vocab_size, hidden_size, generator), exact_rows(num_rows, hidden_size, generator)
    scores = hidden.double() @ head.weight.double()[:, :hidden_size].t() * head.scale
    want = [row.index(max(row)) for row in scores.tolist()]
    assert draft_tokens_reference(hidden, head).tolist() == want
    for tiles in TILES:
        assert draft_tokens_triton(hidden.to(device), to(device, head), tiles=tiles).tolist() == want


def test_rows_without_a_best_token(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    head, hidden = exact_head(200, 48, generator), exact_rows(8, 48, generator)
    hidden[1] = 0.0
    hidden[2, 5], hidden[3, 47], hidden[4, 0] = float("nan"), float("inf"), float("-inf")
    hidden[5] = float("nan")
    want = draft_tokens_reference(hidden, head).tolist()
    assert want[1] == 0 and want[2:6] == [NO_BEST.value] * 4 and min(want[6:]) >= 0
    if device == "cpu":  # the interpreter's fp8 has no NaN
        head = DraftHead(head.weight.half(), head.scale)
    for tiles in TILES:
        assert draft_tokens_triton(hidden.to(device), to(device, head), tiles=tiles).tolist() == want


@pytest.mark.parametrize("by_kernel", [True, False])
def test_written_in_place_a_column_at_a_time(by_kernel: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    head, hidden = exact_head(90, 64, generator), exact_rows(6, 64, generator)
    want = draft_tokens_reference(hidden, head).tolist()
    if not by_kernel:
        device = "cpu"
        monkeypatch.setattr("mambalign.kernels.launch.INTERPRETED", False)
    columns = torch.full((6, 3), -7, device=device)
    assert draft_tokens(hidden.to(device), to(device, head), columns[:, 1]).tolist() == want
    assert columns.tolist() == [[-7, token, -7] for token in want]


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e4])
def test_what_is_chosen_is_near_the_best_of_the_head(magnitude: float, device: str) -> None:
    """Rounding to 3 bits of each factor is an error of some percent of a score's standard deviation."""
    generator = torch.Generator().manual_seed(2)
    head_weight = torch.randn(256, 500, generator=generator).to(torch.bfloat16)
    hidden = (torch.randn(33, 256, generator=generator) * magnitude).float()
    scores = hidden.double() @ head_weight.double()
    tokens = draft_tokens(hidden.to(device), quantize_head(head_weight.to(device))).cpu()
    best = scores.max(dim=1)
    lost = best.values - scores.gather(1, tokens[:, None])[:, 0]
    assert (lost / scores.std(dim=1)).max() < 0.25
    assert (tokens == best.indices).double().mean() > 0.7


def test_the_copy_of_a_head_is_as_near_as_three_bits_are(device: str) -> None:
    vocab_size, hidden_size = QUANTIZED_AT_ONCE + 5, 24
    spread = 10.0 ** torch.linspace(-6, 6, vocab_size)
    head_weight = torch.randn(hidden_size, vocab_size, generator=torch.Generator().manual_seed(3)) * spread
    head_weight[:, 7] = 0.0
    head = quantize_head(head_weight.to(device))
    assert head.weight.dtype == FP8 and head.weight.shape == (vocab_size, 32) and head.weight.is_contiguous()
    assert sum(each.nbytes for each in head) == draft_head_bytes(vocab_size, hidden_size)
    assert not head.weight[:, hidden_size:].float().any()
    copy = (head.weight.float() * head.scale[:, None])[:, :hidden_size].t().cpu()
    largest = head_weight.abs().amax(dim=0)
    smallest_normal = largest / 448 * 2**-6
    error = (copy - head_weight).abs()
    assert (error <= torch.maximum(head_weight.abs(), smallest_normal) * 2**-4 * 1.001).all()
    torch.testing.assert_close(copy.abs().amax(dim=0), largest, rtol=1e-6, atol=0.0)
    assert not copy[:, 7].any()


@pytest.mark.parametrize("value", [0.0, 1e-42, 1e30])
def test_a_copy_of_extreme_weights_is_finite(value: float, device: str) -> None:
    head = quantize_head(torch.full((16, 3), value, device=device))
    assert head.weight.float().isfinite().all() and (head.scale > 0).all()
    assert draft_tokens(torch.ones(2, 16, device=device), head).tolist() == [0, 0]


def test_no_rows_and_tensors_that_do_not_fit(device: str) -> None:
    head = quantize_head(torch.randn(16, 40).to(device))
    assert draft_tokens_triton(torch.empty(0, 16, device=device), head).shape == (0,)
    for hidden in (torch.zeros(2, 32, device=device)[:, :16], torch.zeros(2, 17, device=device)):
        with pytest.raises(ValueError, match="contiguous hidden states"):
            draft_tokens_triton(hidden, head)
