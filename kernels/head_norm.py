"""RMS norms of the heads of queries and keys, each head by itself, in place, before their positions are put in."""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.rms_norm import rms_norm


@triton.jit(do_not_specialize=["stride"])
def _norm(p_x, stride, p_weight, eps, i_head, D: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr):
    """One head of this program's token."""
    o_d = tl.arange(0, BLOCK)
    p_head = p_x + tl.program_id(0).to(tl.int64) * (stride // WORD * WORD) + i_head * D + o_d
    b_x = tl.load(p_head, mask=o_d < D, other=0.0).to(tl.float32)
    b_x = tl.load(p_weight + o_d, mask=o_d < D, other=0.0) * (b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps))
    tl.store(p_head, b_x.to(p_x.dtype.element_ty), mask=o_d < D)


@triton.jit(do_not_specialize=["q_stride", "k_stride"])
def head_norm_kernel(
    p_query, p_key, p_q_weight, p_k_weight, q_stride, k_stride, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x = weight * (x * rsqrt(mean(x^2 of the head) + eps)), rounded, in place.

    Grid (tokens, heads of query and then of key). A program owns one head of one token.
    Reads and writes it; reads the weight of queries or of keys. fp32. WORD divides the strides.
    """
    wait_for_inputs(PDL)
    i_head = tl.program_id(1)
    if i_head < HEADS:
        _norm(p_query, q_stride, p_q_weight, eps, i_head, D, BLOCK, WORD)
    else:
        _norm(p_key, k_stride, p_k_weight, eps, i_head - HEADS, D, BLOCK, WORD)


def norm_heads_reference(
    query: torch.Tensor, key: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> None:
    """`norm_heads`, by torch's norm of rows."""
    for x, weight in ((query, q_weight), (key, k_weight)):
        x.copy_(rms_norm(x.reshape(-1, x.shape[2]), weight, eps).view(x.shape))


def norm_heads_on_gpu(
    query: torch.Tensor, key: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> None:
    """`norm_heads` by the kernel."""
    (num_tokens, num_heads, head_dim), kv_heads = query.shape, key.shape[1]
    word = 16 // query.element_size()
    if any(x.stride(0) % word or x.data_ptr() % 16 for x in (query, key)) or head_dim % word:
        word = 1
    if num_tokens:
        head_norm_kernel[num_tokens, num_heads + kv_heads](
            query, key, q_weight, k_weight, query.stride(0), key.stride(0), eps,
            num_heads, head_dim, triton.next_power_of_2(head_dim), word, num_warps=1, **pdl(query.device),
        )  # fmt: skip


def norm_heads(
    query: torch.Tensor, key: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> None:
    """Norm each head of query [T, heads, head_dim] and key [T, kv_heads, head_dim], in place.

    Weights [head_dim] fp32, of all heads. Tokens of query and key may lie apart (views), the channels of one token
    not. Raises ValueError for what does not fit.
    """
    for x, weight in ((query, q_weight), (key, k_weight)):
        if x.shape[2:] != weight.shape or not x[:1].is_contiguous():
            raise ValueError(f"a norm of heads {tuple(x.shape)}, strides {x.stride()}, by {tuple(weight.shape)}")
    (norm_heads_on_gpu if query.is_cuda else norm_heads_reference)(query, key, q_weight, k_weight, eps)
