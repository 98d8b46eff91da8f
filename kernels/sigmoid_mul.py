"""An output gate: x times sigmoid(gate), as gated attention needs it (arXiv 2505.06708).

Formula: out = x / (1 + exp(-gate)), each element by itself, in fp32, rounded once to the dtype of x.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

BLOCK = 1024


@triton.jit
def sigmoid_mul_kernel(
    p_x, p_gate, p_out,
    X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x / (1 + exp(-gate)).

    Grid (rows, tiles of BLOCK channels). A program owns a tile of a row.
    Reads x and gate, whose rows may lie apart; writes out, contiguous. fp32, each element alone, rounded once.
    """
    wait_for_inputs(PDL)
    i_row, o_channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_channel < WIDTH
    b_x = tl.load(p_x + i_row * X_STRIDE + o_channel, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + i_row * GATE_STRIDE + o_channel, mask=mask, other=0.0).to(tl.float32)
    b_out = b_x / (1.0 + tl.exp(-b_gate))
    tl.store(p_out + i_row * WIDTH + o_channel, b_out.to(p_out.dtype.element_ty), mask=mask)


def sigmoid_mul_reference(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`sigmoid_mul`, by torch operations whose bits do not depend on an element's place."""
    return torch.div(x.float(), gate.float().neg().exp_().add_(1.0)).to(x.dtype)


def sigmoid_mul_on_gpu(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`sigmoid_mul` by the kernel."""
    num_rows, width = x.shape
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    if num_rows:
        sigmoid_mul_kernel[num_rows, triton.cdiv(width, BLOCK)](
            x, gate, out, x.stride(0), gate.stride(0), width, BLOCK, **pdl(x.device)
        )
    return out


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate).

    x, gate [T, D]; rows may lie apart, channels not. Returns [T, D], contiguous, in the dtype of x. Raises ValueError
    for shapes or strides that do not fit.
    """
    if gate.shape != x.shape or gate.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(f"a gate {tuple(gate.shape)} {gate.stride()} on {tuple(x.shape)} {x.stride()}")
    return (sigmoid_mul_on_gpu if x.is_cuda else sigmoid_mul_reference)(x, gate)
