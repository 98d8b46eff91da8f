"""A gate on a value: act(gate) times x, as gated MLPs and ungrouped Mamba-2 gates need it.

Formula: out = act(gate * gate_scale) * x * scale, each element by itself, in fp32, rounded once to the gate's dtype.
act is silu(g) = g / (1 + exp(-g)), or gelu(g) = g / 2 * (1 + erf(g / sqrt(2))) (arXiv 1606.08415), the exact one.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.activation import SQRT_HALF, gelu_of, silu_of
from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

BLOCK = 1024
WORD = 8  # elements that a thread loads at once, where widths and strides are multiples of it
GATES = ("silu", "gelu")


@triton.jit(do_not_specialize=["gate_stride", "x_stride", "width"])
def gate_mul_kernel(
    p_gate, p_x, p_out, gate_stride, x_stride, width, gate_scale, scale,
    GELU: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = act(gate * gate_scale) * x * scale, act being gelu or silu.

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
    b_gate *= gate_scale
    b_out = (gelu_of(b_gate) if GELU else silu_of(b_gate)) * b_x * scale
    tl.store(p_out + i_row * width + o_channel, b_out.to(p_out.dtype.element_ty), mask=mask)


def gate_mul_reference(
    gate: torch.Tensor, x: torch.Tensor, gate_scale: float = 1.0, scale: float = 1.0, activation: str = "silu"
) -> torch.Tensor:
    """`gate_mul`, by torch operations whose bits do not depend on an element's place."""
    gate32 = gate.float() if gate_scale == 1.0 else gate.float() * gate_scale
    gated = torch.mul(gate32, x)
    if activation == "gelu":
        gated.mul_((gate32 * SQRT_HALF.value).erf_().add_(1.0).mul_(0.5))
    else:
        gated.div_(gate32.neg().exp_().add_(1.0))
    return (gated if scale == 1.0 else gated.mul_(scale)).to(gate.dtype)


def gate_mul_on_gpu(
    gate: torch.Tensor, x: torch.Tensor, gate_scale: float = 1.0, scale: float = 1.0, activation: str = "silu"
) -> torch.Tensor:
    """`gate_mul` by the kernel."""
    num_rows, width = gate.shape
    out = torch.empty(num_rows, width, dtype=gate.dtype, device=gate.device)
    word = WORD if all(each % WORD == 0 for each in (width, gate.stride(0), x.stride(0))) else 1
    if num_rows:
        gate_mul_kernel[(num_rows, triton.cdiv(width, BLOCK))](
            gate, x, out, gate.stride(0), x.stride(0), width, float(gate_scale), float(scale), activation == "gelu",
            BLOCK, word, **pdl(x.device),
        )  # fmt: skip
    return out


def gate_mul(
    gate: torch.Tensor, x: torch.Tensor, gate_scale: float = 1.0, scale: float = 1.0, activation: str = "silu"
) -> torch.Tensor:
    """act(gate * gate_scale) * x * scale.

    gate, x [T, D], of any float dtypes; rows may lie apart, channels not. activation: of `GATES`. Returns [T, D],
    contiguous, in the dtype of gate. Raises ValueError for an activation, shapes or strides that do not fit.
    """
    if activation not in GATES:
        raise ValueError(f"a gate of {activation!r}; known: {', '.join(GATES)}")
    if gate.shape != x.shape or gate.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(f"a gate {tuple(gate.shape)} {gate.stride()} on {tuple(x.shape)} {x.stride()}")
    return (gate_mul_on_gpu if gate.is_cuda else gate_mul_reference)(gate, x, gate_scale, scale, activation)
