"""Rows and slots: each row's numbers come from its own slot and go back there; no other slot is touched."""

import pytest
import torch

from mambalign.kernels.slot_rows import (
    BLOCK,
    advance_slots_on_gpu,
    advance_slots_reference,
    gather_slots_on_gpu,
    gather_slots_reference,
)

SLOTS_LEFT_OVER = 3


class Slots:
    """Random numbers of slots, and of the rows that use some of them in any order."""

    def __init__(self, num_rows: int, num_drafts: int, device: str):
        self.generator = torch.Generator().manual_seed(num_rows + 1000 * num_drafts)
        self.num_rows, self.num_drafts, self.device = num_rows, num_drafts, device
        num_slots = num_rows + SLOTS_LEFT_OVER
        self.slots = torch.randperm(num_slots, generator=self.generator)[:num_rows].int().to(device)
        self.num_computed, self.running_column, self.num_accepted = (self.ints(0, 5000, num_slots) for _ in range(3))
        self.next_token = self.ints(0, 1 << 40, num_slots).long() + (1 << 40)
        self.drafts = self.ints(-1, 5, num_slots, num_drafts).long()

    def ints(self, low: int, high: int, *shape: int) -> torch.Tensor:
        dtype = torch.int32 if high <= 1 << 30 else torch.int64
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype).to(self.device)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("num_rows", [1, 7, BLOCK + 3])
def test_gather_slots(num_rows: int, num_drafts: int, device: str) -> None:
    it = Slots(num_rows, num_drafts, device)
    row = torch.arange(num_rows, device=device).repeat_interleave(2 + num_drafts)  # prompts are longer than drafts
    offset = torch.arange(len(row), device=device) % (2 + num_drafts)
    is_prompt = it.ints(0, 2, num_rows)[row] + (offset > num_drafts) > 0
    token_ids = torch.where(is_prompt, it.ints(0, 9, len(row)).long(), -1)
    state = (it.num_computed, it.running_column, it.num_accepted, it.next_token, it.drafts)
    for run in (gather_slots_reference, gather_slots_on_gpu):
        numbers, tokens = run(it.slots, row, offset, token_ids, *state)
        assert numbers.dtype == torch.int32 and tokens.dtype == torch.int64
        for r, slot in enumerate(it.slots.tolist()):
            assert numbers[:, r].tolist() == [int(values[slot]) for values in state[:3]]
        for t, token in enumerate(tokens.tolist()):
            slot, j = it.slots[row[t]], offset[t]
            known = it.next_token[slot] if j == 0 else it.drafts[slot, min(j, num_drafts) - 1] if num_drafts else -1
            assert token == (token_ids[t] if token_ids[t] >= 0 else known)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("num_rows", [1, 7, 60])
def test_advance_slots(num_rows: int, num_drafts: int, device: str) -> None:
    it, block_tokens = Slots(num_rows, num_drafts, device), 16
    row_computed = it.num_computed[it.slots].clone()
    kept, is_decode = it.ints(0, num_drafts + 2, num_rows), it.ints(0, 2, num_rows)
    kept = torch.where(is_decode > 0, kept, kept.clamp(max=1))
    final = torch.where(is_decode > 0, kept, it.ints(1, 40, num_rows))
    counts = torch.stack([kept, it.ints(0, num_drafts + 1, num_rows), final, kept * is_decode]).int()
    token_ids = it.ints(1 << 40, 1 << 41, num_rows, num_drafts + 1)
    draft_ids = it.ints(-1, 1 << 41, num_rows, num_drafts)
    computed, next_token, drafts = it.num_computed.tolist(), it.next_token.tolist(), it.drafts.tolist()
    num_crossed, results = 5, []
    for r, slot in enumerate(it.slots.tolist()):
        num_kept, num_verified, num_final, of_decode = counts[:, r].tolist()
        num_crossed += bool(of_decode) and (computed[slot] + num_final) // 16 > computed[slot] // 16
        computed[slot] += num_final
        if num_kept:
            next_token[slot] = int(token_ids[r, num_kept - 1])
        drafts[slot] = draft_ids[r].tolist()
        results.append([num_kept, num_verified, *token_ids[r].tolist(), *draft_ids[r].tolist()])
    for run in (advance_slots_reference, advance_slots_on_gpu):
        state = [each.clone() for each in (it.num_computed, it.next_token, it.drafts, torch.tensor(5, device=device))]
        got = run(it.slots, row_computed, counts, token_ids, draft_ids, *state, block_tokens)
        assert got.dtype == torch.int64 and got.tolist() == results
        assert [each.tolist() for each in state] == [computed, next_token, drafts, num_crossed]
