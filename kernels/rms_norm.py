"""RMS norms, a row at a time, in fp32. Rounding follows transformers' NemotronH: weight times value, then one cast."""

import torch
import torch.nn.functional as F

from mambalign.kernels.activation import silu

PIECE = 256  # rows normed at a time, so that they stay in the processor's cache


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, D] over its root mean square, times weight [D] (fp32). Returns the dtype of x."""
    return F.rms_norm(x.float(), (x.shape[1],), weight, eps).to(x.dtype)


def rms_norm_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_width: int
) -> torch.Tensor:
    """rms_norm(x * silu(gate)) within groups of `group_width` channels.

    x [T, D] fp32 (what a scan leaves); gate [T, D]; weight [D] fp32. Returns [T, D] in the dtype of gate.
    """
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    for start in range(0, x.shape[0], PIECE):
        rows = slice(start, start + PIECE)
        gated = silu(gate[rows].float()).mul_(x[rows])
        groups = gated.view(gated.shape[0], -1, group_width)
        scale = groups.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        torch.mul(groups.mul_(scale).view_as(gated), weight, out=out[rows])
    return out
