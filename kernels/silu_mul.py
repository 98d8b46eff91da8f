"""A gate on a value: silu(gate) times x, as gated MLPs and ungrouped Mamba-2 gates need it.

Formula: out = silu(gate * gate_scale) * x * scale, each element by itself, in fp32, rounded once to the gate's dtype.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.activation import silu_of
from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

BLOCK = 1024
WORD = 8  # elements that a thread loads at once, where widths and strides are multiples of it


@triton.jit(do_not_specialize=["gate_stride", "x_stride", "width"])
def silu_mul_kernel(
    p_gate, p_x, p_out, gate_stride, x_stride, width, gate_scale, scale,
    BLOCK: tl.constexpr, WORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = silu(gate * gate_scale) * x * scale.

    Grid (rows, tiles of BLOCK channels). A program owns a tile of a row.
    Reads gate and x, whose rows may lie apart; writes out, contiguous. fp32, each element alone, rounded once.
    WORD divides the width and the strides.
    """
    wait_for_inputs(PDL)
    width, gate_stride, x_stride = width // WORD * WORD, gate_stride // WORD * WORD, x_stride // WORD * WORD
    i_row, o_channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_channel < width
    b_gate = tl.load(p_gate + i_row * gate_stride + o_channel, mask=mask, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + i_row * x_stride + o_channel, mask=mask, other=0.0).to(tl.float32)
    b_out = silu_of(b_gate * gate_scale) * b_x * scale
    tl.store(p_out + i_row * width + o_channel, b_out.to(p_out.dtype.element_ty), mask=mask)


def silu_mul_reference(
    gate: torch.Tensor, x: torch.Tensor, gate_scale: float = 1.0, scale: float = 1.0
) -> torch.Tensor:
    """`silu_mul`, by torch operations whose bits do not depend on an element's place."""
    gate32 = gate.float() if gate_scale == 1.0 else gate.float() * gate_scale
    gated = torch.mul(gate32, x).div_(gate32.neg().exp_().add_(1.0))
    return (gated if scale == 1.0 else gated.mul_(scale)).to(gate.dtype)


def silu_mul_on_gpu(gate: torch.Tensor, x: torch.Tensor, gate_scale: float = 1.0, scale: float = 1.0) -> torch.Tensor:
    """`silu_mul` by the kernel."""
    num_rows, width = gate.shape
    out = torch.empty(num_rows, width, dtype=gate.dtype, device=gate.device)
    word = WORD if all(each % WORD == 0 for each in (width, gate.stride(0), x.stride(0))) else 1
    if num_rows:
        silu_mul_kernel[(num_rows, triton.cdiv(width, BLOCK))](
            gate, x, out, gate.stride(0), x.stride(0), width, float(gate_scale), float(scale), BLOCK, word,
            **pdl(x.device),
        )  # fmt: skip
    return out


def silu_mul(gate: torch.Tensor, x: torch.Tensor, gate_scale: float = 1.0, scale: float = 1.0) -> torch.Tensor:
    """silu(gate * gate_scale) * x * scale.

    gate, x [T, D], of any float dtypes; rows may lie apart, channels not. Returns [T, D], contiguous, in the dtype of
    gate. Raises ValueError for shapes or strides that do not fit.
    """
    if gate.shape != x.shape or gate.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(f"a gate {tuple(gate.shape)} {gate.stride()} on {tuple(x.shape)} {x.stride()}")
    return (silu_mul_on_gpu if gate.is_cuda else silu_mul_reference)(gate, x, gate_scale, scale)
