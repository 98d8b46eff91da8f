"""Rotary positions: the formula, the kernel, and bits that follow from a token's position alone."""

import pytest
import torch

from mambalign.kernels.rotary import rotary_embed, rotary_embed_on_gpu, rotary_embed_reference, rotary_table
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
def test_reference_and_kernel_are_the_formula(sizes, dtype: torch.dtype, device: str) -> None:
    _, num_heads, kv_heads, head_dim, half = sizes
    qkv, positions, table, inv_freq = inputs(*sizes, dtype)
    rest = views(qkv, num_heads, kv_heads, head_dim)
    want = [complex_rotation(x, positions, inv_freq, 1.25) for x in rest]
    for run, where in ((rotary_embed_reference, "cpu"), (rotary_embed_on_gpu, device)):
        on_device = qkv.clone().to(where)
        query, key = views(on_device, num_heads, kv_heads, head_dim)
        run(query, key, positions.to(where), table.to(where))
        for got, before, expected in zip((query, key), rest, want, strict=True):
            torch.testing.assert_close(got.cpu(), expected.to(dtype), **tolerance("kernel", dtype))
            assert torch.equal(got.cpu()[..., 2 * half :], before[..., 2 * half :])
        rest_of_row = (num_heads + kv_heads) * head_dim
        assert torch.equal(on_device.cpu()[:, rest_of_row:], qkv[:, rest_of_row:])


def test_a_token_alone_gives_the_bits_of_the_batch(device: str) -> None:
    qkv, positions, table, _ = inputs(7, 6, 2, 33, 16, torch.float32)
    for run, where in ((rotary_embed, "cpu"), (rotary_embed_on_gpu, device)):
        whole = qkv.clone().to(where)
        run(*views(whole, 6, 2, 33), positions.to(where), table.to(where))
        for token in range(7):
            alone = qkv[token : token + 1].clone().to(where)
            run(*views(alone, 6, 2, 33), positions[token : token + 1].to(where), table.to(where))
            assert torch.equal(alone, whole[token : token + 1])


def test_positions_outside_the_table_take_the_nearest_line(device: str) -> None:
    """A draft may stand past the longest text: nobody looks at what it computes, but it must not be a wild read."""
    _, _, table, _ = inputs(3, 1, 1, 8, 4, torch.float32)
    for run, where in ((rotary_embed, "cpu"), (rotary_embed_on_gpu, device)):
        query, key = torch.ones(3, 1, 8, device=where), torch.ones(3, 1, 8, device=where)
        run(query, key, torch.tensor([39, 40, 4000], device=where), table.to(where))
        assert torch.equal(query, query[:1].expand_as(query)) and torch.equal(query, key)


def test_the_table_is_cosines_and_sines_of_fp32_angles() -> None:
    inv_freq = 1.0 / 1e4 ** (torch.arange(8) / 8)
    table = rotary_table(inv_freq, 1.0, 5000)  # more lines than are filled at a time
    angles = torch.arange(5000).float()[:, None] * inv_freq
    torch.testing.assert_close(table[:, 0], angles.double().cos().float(), **tolerance("kernel", torch.float32))
    torch.testing.assert_close(table[:, 1], angles.double().sin().float(), **tolerance("kernel", torch.float32))


def test_what_does_not_fit_is_refused() -> None:
    table = rotary_table(torch.ones(4), 1.0, 4)
    x = torch.ones(2, 3, 8)
    with pytest.raises(ValueError, match="rotary of"):
        rotary_embed(x[..., :6].contiguous(), x, torch.zeros(2, dtype=torch.int64), table)
    with pytest.raises(ValueError, match="strides"):
        rotary_embed(x, x.transpose(1, 2).contiguous().transpose(1, 2), torch.zeros(2, dtype=torch.int64), table)
