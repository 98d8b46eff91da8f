"""Activations built from operations whose bits do not depend on an element's place in its tensor.

torch's vectorised `silu`, `softplus` and `sigmoid` round differently in the scalar tail of a tensor than in its body,
so a token's bits would change with the batch. `exp`, `log1p`, `erf`, `div`, `mul` and `add` do not (a test pins it). On
a GPU one kernel does what those would do in several.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

SOFTPLUS_LINEAR_ABOVE = 20.0  # softplus(x) == x in fp32 from here on (the threshold of torch's softplus)
SQRT_HALF: tl.constexpr = tl.constexpr(0.5**0.5)
BLOCK = 2048


@triton.jit
def silu_of(b_x):
    """x / (1 + exp(-x)) of fp32 values."""
    return b_x / (1.0 + tl.exp(-b_x))


@triton.jit
def gelu_of(b_x):
    """x / 2 * (1 + erf(x / sqrt(2))) of fp32 values."""
    return 0.5 * b_x * (1.0 + tl.erf(b_x * SQRT_HALF))


@triton.jit(do_not_specialize=["num_elements"])
def activation_kernel(
    p_x, p_out, num_elements, WORD: tl.constexpr, RELU2: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """out = relu2(x) or silu(x), each element by itself, in fp32, rounded once. Grid: blocks of BLOCK elements.

    WORD divides num_elements: a mask that changes within a thread's widest load would split it.
    """
    wait_for_inputs(PDL)
    num_elements = num_elements // WORD * WORD
    o_element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_element, mask=o_element < num_elements, other=0.0).to(tl.float32)
    if RELU2:
        b_x = tl.where(b_x < 0.0, 0.0, b_x)
        b_out = b_x * b_x
    else:
        b_out = silu_of(b_x)
    tl.store(p_out + o_element, b_out.to(p_out.dtype.element_ty), mask=o_element < num_elements)


def activation_on_gpu(x: torch.Tensor, relu2: bool) -> torch.Tensor:
    """relu2 or silu of each element, contiguous, in the dtype of x."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        word = next(word for word in (16, 1) if x.numel() % word == 0)
        activation_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), word, relu2, BLOCK, **pdl(x.device))
    return out


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)), computed in fp32, in the dtype of x."""
    if x.is_cuda:
        return activation_on_gpu(x, relu2=False)
    x32 = x.float()
    return torch.div(x32, x32.neg().exp_().add_(1.0)).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) in fp32."""
    x32 = x.float()
    return torch.where(x32 > SOFTPLUS_LINEAR_ABOVE, x32, x32.exp().log1p_())


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0) squared (arXiv 2109.08668), in the dtype of x."""
    if x.is_cuda:
        return activation_on_gpu(x, relu2=True)
    positive = x.relu()
    return positive.mul_(positive)


ACTIVATIONS = {"silu": silu, "swish": silu, "relu2": relu2}
