"""Addresses of the drafter's passes: of all rows or of some, in any order, inert ones among them."""

import pytest
import torch

from mambalign.kernels.draft_addresses import BLOCK, draft_addresses_on_gpu, draft_addresses_reference

KV_BLOCK = 40


@pytest.mark.parametrize("num_rows", [1, 7, BLOCK + 3])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("num_passes", [1, 3])
def test_draft_addresses(num_rows: int, some: bool, num_passes: int, device: str) -> None:
    generator = torch.Generator().manual_seed(num_rows)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32).to(device)

    query_start, num_computed, num_final = ints(0, 99, num_rows), ints(0, 300, num_rows), ints(0, 5, num_rows)
    num_final[0] = 2
    kv_table = ints(1 << 29, 1 << 30, num_rows, 9)
    order = torch.randperm(num_rows, generator=generator)[: num_rows // 2 + 1].to(device)
    drafting = order if some else None
    arguments = (query_start, num_computed, num_final, drafting, kv_table, num_passes, KV_BLOCK)
    want, got = draft_addresses_reference(*arguments), draft_addresses_on_gpu(*arguments)
    for name, a, b in zip(want._fields, want, got, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    # The formulas once more, a row and a pass at a time.
    n, f, table = num_computed.tolist(), num_final.tolist(), kv_table.tolist()
    assert got.first.tolist() == [each + 1 for each in n]
    for d, r in enumerate(order.tolist() if some else range(num_rows)):
        assert got.last[d] == query_start[r] + max(f[r] - 1, 0) and got.query_len[d] == min(f[r], 1)
        for i in range(num_passes):
            position = n[r] + f[r] + i
            block = table[r][min(position // KV_BLOCK, 8)]
            assert got.context_len[i, d] == got.positions[i, d] == position
            assert got.slots[i, d] == (block * KV_BLOCK + position % KV_BLOCK if f[r] else -1)
    if not some:
        assert got.slots.max() > 1 << 31, "block ids times tokens pass 32 bits"
