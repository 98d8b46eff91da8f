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


def make_step(num_rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Random rows with room for 5 tokens each, some of them inert."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    tokens = torch.arange(5 * num_rows)
    return dict(
        row=tokens // 5,
        offset=tokens % 5,
        boundary_block=ints(-1, 50, 5 * num_rows).long(),
        query_len=ints(0, 6, num_rows),
        is_decode=ints(0, 2, num_rows),
        num_computed=ints(0, 2, num_rows) * ints(1, 300, num_rows),
        running_column=ints(0, 7, num_rows),
        num_accepted=ints(0, 4, num_rows),
        table=ints(1 << 29, 1 << 30, num_rows, 9),
    )


@pytest.mark.parametrize("num_rows", [1, 7, 64, BLOCK + 3])
def test_state_blocks(num_rows: int, device: str) -> None:
    step = {name: tensor.to(device) for name, tensor in make_step(num_rows, num_rows).items()}
    want, got = state_blocks_reference(**step), state_blocks_on_gpu(*step.values())
    for name, a, b in zip(("state", "conv", "temporal", "offset"), want, got, strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(want[3], step["num_accepted"] - 1)
    # The formula once more, a token at a time.
    rows = {name: tensor.tolist() for name, tensor in step.items()}
    for t, (r, j) in enumerate(zip(rows["row"], rows["offset"], strict=True)):
        table, column, q = rows["table"][r], rows["running_column"][r], rows["query_len"][r]
        if j >= q:
            expected = -1
        elif rows["is_decode"][r]:
            expected = table[min(column + j, 8)]
        else:
            expected = table[column] if j == q - 1 else rows["boundary_block"][t]
        assert want[0][t] == expected


@pytest.mark.parametrize("num_rows", [1, 7, BLOCK + 3])
@pytest.mark.parametrize("one_each", [False, True])
def test_token_slots(num_rows: int, one_each: bool, device: str) -> None:
    step = {name: tensor.to(device) for name, tensor in make_step(num_rows, num_rows + 50).items()}
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
