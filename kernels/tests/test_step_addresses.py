"""Addresses of a step: the kernels give what the formulas give, for padded, decode and prompt rows."""

import pytest
import torch

from mambalign.kernels.step_addresses import (
    BLOCK,
    state_blocks_on_gpu,
    state_blocks_reference,
    token_slots_on_gpu,
    token_slots_reference,
)


def make_step(num_rows: int, seed: int) -> dict[str, torch.Tensor | int]:
    """Random rows with room for 5 tokens each, some of them inert."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    tokens = torch.arange(5 * num_rows)
    num_computed = ints(0, 2, num_rows) * ints(4, 300, num_rows)
    return dict(
        row=tokens // 5,
        offset=tokens % 5,
        boundary_block=ints(-1, 50, 5 * num_rows).long(),
        query_len=ints(0, 6, num_rows),
        is_decode=ints(0, 2, num_rows),
        num_computed=num_computed,
        running_column=ints(0, 7, num_rows),
        num_accepted=ints(0, 4, num_rows).minimum(num_computed + 1),  # no more than there are
        table=ints(1 << 29, 1 << 30, num_rows, 9),
        num_spec_tokens=3,
        defer_within=16,
    )


def on(device: str, step: dict) -> dict:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in step.items()}


@pytest.mark.parametrize("num_rows", [1, 7, 64, BLOCK + 3])
def test_state_blocks(num_rows: int, device: str) -> None:
    step = on(device, make_step(num_rows, num_rows))
    (*want, deferral), (*got, deferral_got) = state_blocks_reference(**step), state_blocks_on_gpu(*step.values())
    for name, a, b in zip(("state", "conv", "temporal", "offset"), want, got, strict=True):
        assert torch.equal(a, b), name
    for name, value in vars(deferral).items():
        assert torch.equal(value, getattr(deferral_got, name)), name
    assert torch.equal(want[3], step["num_accepted"] - 1)
    # The formula once more, a token at a time.
    rows = {name: tensor.tolist() for name, tensor in step.items() if isinstance(tensor, torch.Tensor)}
    for t, (r, j) in enumerate(zip(rows["row"], rows["offset"], strict=True)):
        table, column, q = rows["table"][r], rows["running_column"][r], rows["query_len"][r]
        if j >= q:
            expected = -1
        elif rows["is_decode"][r]:
            expected = table[min(column + j, 8)]
        else:
            expected = table[column] if j == q - 1 else rows["boundary_block"][t]
        assert want[0][t] == expected


def test_a_row_defers_only_where_no_copy_can_need_its_drafts(device: str) -> None:
    """Blocks of 16, 3 drafts: rows of every length, that kept 1 .. 4 tokens of a step of 4 in column 2."""
    kept = torch.arange(40).repeat(4) % 4 + 1
    computed = torch.arange(160) // 4 + 4
    one = torch.ones(160, dtype=torch.int32)
    table = torch.arange(160 * 9, dtype=torch.int32).view(160, 9) + 1
    numbers = (one * 4, one, computed.int(), one * 2, kept.int(), table)
    step = on(device, dict(row=torch.arange(160), offset=torch.zeros(160).long(), boundary=torch.full((160,), -1)))
    numbers = [each.to(device) for each in numbers]
    _, _, temporal, _, deferral = state_blocks_on_gpu(*step.values(), *numbers, 3, 16)
    for r, (n, a) in enumerate(zip(computed.tolist(), kept.tolist(), strict=True)):
        # This step and the next end before the boundary's token, or one of them may owe a copy.
        assert deferral.is_deferring[r] == (n % 16 + 4 + 4 <= 16), n
        had = a > 1 and (n - a) % 16 + 4 + 4 <= 16
        assert deferral.num_replays[r] == (a - 1 if had else 0)
        assert temporal[r] == table[r, 2 if had else 2 + a - 1]
        assert deferral.replay_block[r].tolist() == table[r, 3:6].tolist()
    never = state_blocks_on_gpu(*step.values(), *numbers, 3, 1)[4]
    assert not never.is_deferring.any() and not never.num_replays.any()


@pytest.mark.parametrize("num_rows", [1, 7, BLOCK + 3])
@pytest.mark.parametrize("one_each", [False, True])
def test_token_slots(num_rows: int, one_each: bool, device: str) -> None:
    step = on(device, make_step(num_rows, num_rows + 50))
    row, offset = (None, None) if one_each else (step["row"], step["offset"])
    arguments = (row, offset, step["num_computed"], step["query_len"], step["table"], 40)
    positions, slots = token_slots_reference(*arguments)
    for want, got in zip((positions, slots), token_slots_on_gpu(*arguments), strict=True):
        assert torch.equal(want, got)
    if num_rows > 1:
        assert slots.max() > 1 << 31, "block ids times tokens pass 32 bits"
    for t, position in enumerate(positions.tolist()):
        r, j = (t, 0) if one_each else (t // 5, t % 5)
        assert position == step["num_computed"][r] + j
        block = step["table"][r, min(position // 40, 8)]
        assert slots[t] == (int(block) * 40 + position % 40 if j < step["query_len"][r] else -1)
