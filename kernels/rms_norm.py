"""RMS norms, a row at a time, in fp32. Rounding follows transformers' NemotronH: weight times value, then one cast."""

import torch

from mambalign.kernels.activation import silu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, D] over its root mean square, times weight [D] (fp32). Returns the dtype of x."""
    x32 = x.float()
    scale = x32.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (weight * (x32 * scale)).to(x.dtype)


def rms_norm_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_width: int
) -> torch.Tensor:
    """rms_norm(x * silu(gate)) within groups of `group_width` channels.

    x [T, D] fp32 (what a scan leaves); gate [T, D]; weight [D] fp32. Returns [T, D] in the dtype of gate.
    """
    gated = silu(gate.float()).mul_(x)
    groups = gated.view(x.shape[0], -1, group_width)
    scale = groups.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return groups.mul_(scale).view_as(gated).mul_(weight).to(gate.dtype)
