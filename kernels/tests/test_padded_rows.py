"""Rows in a padded step: each lies where it should, rows past them are inert, and nothing else is touched."""

import pytest
import torch

from mambalign.kernels.padded_rows import (
    BLOCK,
    pad_rows_on_gpu,
    pad_rows_reference,
    pad_sampled_on_gpu,
    pad_sampled_reference,
)

STALE = -7  # what a place held before


def make_rows(num_given: int, width: int, device: str) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Lengths from 0 to width, the first full; query_len and query_start int32."""
    lengths = [
        width,
        *torch.randint(0, width + 1, (num_given - 1,), generator=torch.Generator().manual_seed(1)).tolist(),
    ]
    query_len = torch.tensor(lengths, dtype=torch.int32)
    return lengths, query_len.to(device), (query_len.cumsum(0) - query_len).int().to(device)


CASES = pytest.mark.parametrize(("num_given", "num_rows", "width"), [(1, 1, 4), (1, 4, 1), (5, 8, 4), (17, 24, 8)])


@CASES
@pytest.mark.parametrize("run", [pad_rows_reference, pad_rows_on_gpu])
def test_pad_rows(run, num_given: int, num_rows: int, width: int, device: str) -> None:
    generator = torch.Generator().manual_seed(num_given)

    def ints(*shape: int) -> torch.Tensor:
        return torch.randint(1, 1 << 30, shape, generator=generator, dtype=torch.int32).to(device)

    lengths, query_len, query_start = make_rows(num_given, width, device)
    numbers, token_ids = ints(3, num_given), ints(sum(lengths)).long() << 20
    state_table, kv_table = ints(num_given, BLOCK + 5), ints(num_given, 2 * BLOCK + 1)
    out = [
        torch.full(shape, STALE, dtype=torch.int32, device=device) for shape in ((4, num_rows), (num_rows, BLOCK + 5))
    ]
    kv_out = torch.full((num_rows, 2 * BLOCK + 9), STALE, dtype=torch.int32, device=device)
    tokens_out, place = torch.full((2, num_rows * width), STALE, device=device)
    run(query_start, query_len, *numbers, token_ids, state_table, kv_table, out[0], tokens_out, place, out[1], kv_out)
    assert out[0][:, :num_given].tolist() == [lengths, *numbers.tolist()] and not out[0][:, num_given:].any()
    places = [r * width + j for r, q in enumerate(lengths) for j in range(q)]
    assert place.tolist() == places + [STALE] * (len(place) - len(places))
    want = torch.full_like(tokens_out, STALE)
    want[places] = token_ids
    assert torch.equal(tokens_out, want)
    for table, padded in ((state_table, out[1]), (kv_table, kv_out)):
        assert torch.equal(padded[:num_given, : table.shape[1]], table)
        assert (padded[num_given:] == STALE).all() and (padded[:, table.shape[1] :] == STALE).all()


@CASES
@pytest.mark.parametrize("run", [pad_sampled_reference, pad_sampled_on_gpu])
def test_pad_sampled(run, num_given: int, num_rows: int, width: int, device: str) -> None:
    lengths, query_len, query_start = make_rows(num_given, width, device)
    sampled = torch.arange(sum(lengths), device=device) + (1 << 40)
    final = torch.arange(1, 1 + num_given, dtype=torch.int32, device=device)
    sampled_out = torch.full((num_rows * width,), STALE, device=device)
    final_out = torch.full((num_rows,), STALE, dtype=torch.int32, device=device)
    run(query_start, query_len, sampled, final, sampled_out, final_out)
    assert final_out.tolist() == final.tolist() + [0] * (num_rows - num_given)
    want = torch.full_like(sampled_out, STALE)
    want[[r * width + j for r, q in enumerate(lengths) for j in range(q)]] = sampled
    assert torch.equal(sampled_out, want)
