"""The weighted sum of what a token's experts gave, in the order of its choice, and of what all tokens share."""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

BLOCK = 1024


@triton.jit
def combine_experts_kernel(
    p_y,
    p_weights,
    p_shared,
    p_gate,
    p_out,
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[t] = sum over i of weights[t, i] * y[t, i], in order, (+ shared[t] (* sigmoid(gate[t]))), rounded once.

    Grid: (tokens, blocks of BLOCK columns); a program owns one block. Reads y, weights, shared, gate; writes out. fp32.
    """
    wait_for_inputs(PDL)
    i_t, o_d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOP_K):
        b_y = tl.load(p_y + (i_t * TOP_K + i) * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        b_sum += tl.load(p_weights + i_t * TOP_K + i) * b_y
    if HAS_SHARED:
        b_shared = tl.load(p_shared + i_t * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
        if HAS_GATE:
            b_shared *= 1.0 / (1.0 + tl.exp(-tl.load(p_gate + i_t).to(tl.float32)))
        b_sum += b_shared
    tl.store(p_out + i_t * D + o_d, b_sum.to(p_out.dtype.element_ty), mask=o_d < D)


def combine_experts_reference(
    y: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """The weighted sum of each token's results, best expert first, and what the shared experts add.

    y [T * k, D]; weights fp32 [T, k]; shared [T, D]; gate [T, 1], whose sigmoid scales `shared`. Returns [T, D] in the
    dtype of y, rounded once.
    """
    y = y.view(*weights.shape, y.shape[1])
    total = weights[:, :1] * y[:, 0]
    for i in range(1, weights.shape[1]):
        total += weights[:, i : i + 1] * y[:, i]
    if shared is not None:
        shared = shared.float()
        total += shared if gate is None else shared * torch.div(1.0, gate.float().neg().exp_().add_(1.0))
    return total.to(y.dtype)


def combine_experts(
    y: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """`combine_experts_reference`; on a GPU in one launch. All contiguous."""
    function = combine_experts_on_gpu if y.is_cuda else combine_experts_reference
    return function(y, weights, shared, gate)


def combine_experts_on_gpu(
    y: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """The kernel behind `combine_experts`."""
    num_tokens, top_k = weights.shape
    out = y.new_empty(num_tokens, y.shape[1])
    if num_tokens:
        combine_experts_kernel[(num_tokens, triton.cdiv(y.shape[1], BLOCK))](
            y, weights, y if shared is None else shared, y if gate is None else gate, out,
            D=y.shape[1], TOP_K=top_k, HAS_SHARED=shared is not None, HAS_GATE=gate is not None, BLOCK=BLOCK,
            **pdl(y.device),
        )  # fmt: skip
    return out
