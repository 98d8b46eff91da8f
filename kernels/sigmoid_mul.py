"""An output gate: x times sigmoid(gate), as gated attention needs it (arXiv 2505.06708).

Formula: out = x / (1 + exp(-gate)), each element by itself, in fp32, rounded once to the dtype of x.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def gated(b_x, b_gate):
    """x / (1 + exp(-gate)) of a tile, in the dtype of x. Attention's kernels end in it (`attention_tile.py`)."""
    return (b_x.to(tl.float32) / (1.0 + tl.exp(-b_gate.to(tl.float32)))).to(b_x.dtype)


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), in the dtype of x, by torch operations whose bits do not depend on an element's place."""
    return torch.div(x.float(), gate.float().neg().exp_().add_(1.0)).to(x.dtype)
