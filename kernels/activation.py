"""Activations built from operations whose bits do not depend on an element's place in its tensor.

torch's vectorised `silu`, `softplus` and `sigmoid` round differently in the scalar tail of a tensor than in its body,
so a token's bits would change with the batch. `exp`, `log1p`, `div`, `mul` and `add` do not (a test pins it).
"""

import torch

SOFTPLUS_LINEAR_ABOVE = 20.0  # softplus(x) == x in fp32 from here on (the threshold of torch's softplus)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)), computed in fp32, in the dtype of x."""
    x32 = x.float()
    return torch.div(x32, x32.neg().exp_().add_(1.0)).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) in fp32."""
    x32 = x.float()
    return torch.where(x32 > SOFTPLUS_LINEAR_ABOVE, x32, x32.exp().log1p_())


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0) squared (arXiv 2109.08668), in the dtype of x."""
    positive = x.relu()
    return positive.mul_(positive)


ACTIVATIONS = {"silu": silu, "swish": silu, "relu2": relu2}
