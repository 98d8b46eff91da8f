"""Norms of heads in place: the formula, what stays, and bits that do not depend on a token's batch."""

import pytest
import torch

from mambalign.kernels.head_norm import HeadNorms, norm_heads
from mambalign.kernels.tolerances import tolerance

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), [(3, 1, 33), (4, 2, 128)])
def test_the_formula(num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator, widths = torch.Generator().manual_seed(head_dim), [num_heads * head_dim, kv_heads * head_dim, 5]
    qkv = torch.randn(6, sum(widths), generator=generator).to(dtype)
    weights = torch.randn(2, head_dim, generator=generator)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.clone()
        query, key, _ = tokens.split(widths, dim=1)
        norm_heads(query.unflatten(1, (num_heads, -1)), key.unflatten(1, (kv_heads, -1)), HeadNorms(*weights, EPS))
        return tokens

    want = [t.unflatten(1, (-1, head_dim)).double() for t in qkv.split(widths, dim=1)[:2]]
    want = [w * x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() for x, w in zip(want, weights, strict=True)]
    whole = run(qkv)
    query, key, rest = whole.split(widths, dim=1)
    for got, x in zip((query, key), want, strict=True):
        torch.testing.assert_close(got, x.flatten(1).to(dtype), **tolerance("kernel", dtype))
    assert torch.equal(rest, qkv[:, -5:])
    for row in range(6):
        assert torch.equal(run(qkv[row : row + 1]), whole[row : row + 1])
