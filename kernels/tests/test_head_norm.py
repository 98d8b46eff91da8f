"""Norms of heads in place: the formula, the kernel, what stays, and bits that do not depend on a token's batch."""

import pytest
import torch

from mambalign.kernels.head_norm import norm_heads, norm_heads_on_gpu
from mambalign.kernels.tolerances import tolerance

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim"), [(3, 1, 33), (4, 2, 128)])
def test_reference_and_kernel_are_the_formula(
    num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    generator, widths = torch.Generator().manual_seed(head_dim), [num_heads * head_dim, kv_heads * head_dim, 5]
    qkv = torch.randn(6, sum(widths), generator=generator).to(dtype)
    weights = torch.randn(2, head_dim, generator=generator)

    def run(function, tokens: torch.Tensor, some_weights: torch.Tensor) -> torch.Tensor:
        tokens = tokens.clone()
        query, key, _ = tokens.split(widths, dim=1)
        function(query.unflatten(1, (num_heads, -1)), key.unflatten(1, (kv_heads, -1)), *some_weights, EPS)
        return tokens

    want = [t.unflatten(1, (-1, head_dim)).double() for t in qkv.split(widths, dim=1)[:2]]
    want = [w * x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() for x, w in zip(want, weights, strict=True)]
    for function, where in ((norm_heads, "cpu"), (norm_heads_on_gpu, device)):
        given, some_weights = qkv.to(where), weights.to(where)
        whole = run(function, given, some_weights)
        query, key, rest = whole.cpu().split(widths, dim=1)
        for got, x in zip((query, key), want, strict=True):
            torch.testing.assert_close(got, x.flatten(1).to(dtype), **tolerance("kernel", dtype))
        assert torch.equal(rest, qkv[:, -5:])
        for row in range(6):
            assert torch.equal(run(function, given[row : row + 1], some_weights), whole[row : row + 1])


def test_what_does_not_fit_is_refused() -> None:
    query, key, weight = torch.ones(2, 3, 4), torch.ones(2, 1, 4), torch.ones(4)
    with pytest.raises(ValueError, match="a norm of heads"):
        norm_heads(query, key, weight, torch.ones(5), EPS)
    with pytest.raises(ValueError, match="a norm of heads"):
        norm_heads(query.transpose(1, 2).contiguous().transpose(1, 2), key, weight, weight, EPS)
