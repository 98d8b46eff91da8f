"""Rotary positions: the formula, and bits that follow from a token's position alone."""

import pytest
import torch

from mambalign.kernels.rotary import rotary_embed, rotary_table
from mambalign.kernels.tolerances import tolerance

SIZES = [(1, 1, 1, 4, 2), (5, 6, 2, 10, 5), (3, 3, 1, 33, 8), (7, 4, 4, 16, 4)]  # tokens, heads, kv heads, dim, half


def inputs(num_tokens: int, num_heads: int, kv_heads: int, head_dim: int, half: int, dtype: torch.dtype):
    """Query and key as views of one tensor, positions out of order, a table of 40 lines."""
    generator = torch.Generator().manual_seed(num_tokens + head_dim)
    qkv = torch.randn(num_tokens, (num_heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    positions = torch.randint(0, 40, (num_tokens,), generator=generator)
    inv_freq = 1.0 / 50.0 ** (torch.arange(half) / half)
    return qkv, positions, rotary_table(inv_freq, 1.25, 40), inv_freq


def views(qkv: torch.Tensor, num_heads: int, kv_heads: int, head_dim: int) -> list[torch.Tensor]:
    widths = [num_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    return [x.unflatten(1, (-1, head_dim)) for x in qkv.split(widths, 1)[:2]]


def complex_rotation(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, scale: float) -> torch.Tensor:
    """The formula as a product of complex numbers in fp64."""
    half, out = len(inv_freq), x.double().clone()
    turn = torch.polar(torch.tensor(scale, dtype=torch.float64), positions[:, None].double() * inv_freq.double())
    turned = torch.complex(out[..., :half], out[..., half : 2 * half].clone()) * turn[:, None]
    out[..., :half], out[..., half : 2 * half] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_formula(sizes, dtype: torch.dtype) -> None:
    _, num_heads, kv_heads, head_dim, half = sizes
    qkv, positions, table, inv_freq = inputs(*sizes, dtype)
    before = views(qkv, num_heads, kv_heads, head_dim)
    turned = qkv.clone()
    after = views(turned, num_heads, kv_heads, head_dim)
    rotary_embed(*after, positions, table)
    for got, given in zip(after, before, strict=True):
        expected = complex_rotation(given, positions, inv_freq, 1.25).to(dtype)
        torch.testing.assert_close(got, expected, **tolerance("kernel", dtype))
        assert torch.equal(got[..., 2 * half :], given[..., 2 * half :])
    rest_of_row = (num_heads + kv_heads) * head_dim
    assert torch.equal(turned[:, rest_of_row:], qkv[:, rest_of_row:])


def test_a_token_alone_gives_the_bits_of_the_batch() -> None:
    qkv, positions, table, _ = inputs(7, 6, 2, 33, 16, torch.float32)
    whole = qkv.clone()
    rotary_embed(*views(whole, 6, 2, 33), positions, table)
    for token in range(7):
        alone = qkv[token : token + 1].clone()
        rotary_embed(*views(alone, 6, 2, 33), positions[token : token + 1], table)
        assert torch.equal(alone, whole[token : token + 1])


def test_positions_outside_the_table_take_the_nearest_line() -> None:
    """A draft may stand past the longest text: nobody looks at what it computes, but it must not be a wild read."""
    _, _, table, _ = inputs(3, 1, 1, 8, 4, torch.float32)
    query, key = torch.ones(3, 1, 8), torch.ones(3, 1, 8)
    rotary_embed(query, key, torch.tensor([39, 40, 4000]), table)
    assert torch.equal(query, query[:1].expand_as(query)) and torch.equal(query, key)


def test_the_table_is_cosines_and_sines_of_fp32_angles() -> None:
    inv_freq = 1.0 / 1e4 ** (torch.arange(8) / 8)
    table = rotary_table(inv_freq, 1.0, 5000)  # more lines than are filled at a time
    angles = torch.arange(5000).float()[:, None] * inv_freq
    torch.testing.assert_close(table[:, 0], angles.double().cos().float(), **tolerance("kernel", torch.float32))
    torch.testing.assert_close(table[:, 1], angles.double().sin().float(), **tolerance("kernel", torch.float32))
