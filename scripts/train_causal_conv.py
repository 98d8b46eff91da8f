"""Causal depthwise convolution of four taps and SiLU, forward and backward: by Triton on a GPU, eager on a CPU.

Shapes: B rows, T tokens, C channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


@triton.jit
def _conv_tap(x, t, c, ok, T: tl.constexpr, STRIDE: tl.constexpr):
    """Inputs at positions t [BT,1], channels c [1,BC] of the row at x; zeros outside the row."""
    return tl.load(x + t * STRIDE + c, mask=ok & (t >= 0) & (t < T), other=0.0).to(tl.float32)


@triton.jit
def _conv_forward(
    x, weight, bias, y, STRIDE: tl.constexpr, T: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):
    """y = silu(conv(x)). One program owns BT positions of one row times BC channels; fp32 inside."""
    row = tl.program_id(0).to(tl.int64)
    t = (tl.program_id(1) * BT + tl.arange(0, BT))[:, None]
    c = (tl.program_id(2) * BC + tl.arange(0, BC))[None, :]
    ok = c < C
    u = tl.load(bias + c, mask=ok)
    for tap in tl.static_range(4):
        u += tl.load(weight + c * 4 + tap, mask=ok) * _conv_tap(x + row * T * STRIDE, t - 3 + tap, c, ok, T, STRIDE)
    out = u * tl.sigmoid(u)
    tl.store(y + row * T * C + t * C + c, out.to(y.dtype.element_ty), mask=ok & (t < T))


@triton.jit
def _conv_slopes(
    x, weight, bias, dy, du, dw, STRIDE: tl.constexpr, T: tl.constexpr, C: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """du = dy * silu'(u), and this tile's share of the weight and bias gradients in dw [rows, tiles, 5, C]."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = (tile * BT + tl.arange(0, BT))[:, None]
    c = (tl.program_id(2) * BC + tl.arange(0, BC))[None, :]
    ok = c < C
    base = x + row * T * STRIDE
    x0, x1 = _conv_tap(base, t - 3, c, ok, T, STRIDE), _conv_tap(base, t - 2, c, ok, T, STRIDE)
    x2, x3 = _conv_tap(base, t - 1, c, ok, T, STRIDE), _conv_tap(base, t, c, ok, T, STRIDE)
    u = tl.load(bias + c, mask=ok) + tl.load(weight + c * 4, mask=ok) * x0
    u += tl.load(weight + c * 4 + 1, mask=ok) * x1 + tl.load(weight + c * 4 + 2, mask=ok) * x2
    u += tl.load(weight + c * 4 + 3, mask=ok) * x3
    sig = tl.sigmoid(u)
    slope = _conv_tap(dy + row * T * C, t, c, ok, T, C) * sig * (1 + u * (1 - sig))
    tl.store(du + row * T * C + t * C + c, slope.to(du.dtype.element_ty), mask=ok & (t < T))
    part = dw + ((row * tl.num_programs(1) + tile) * 5) * C + c
    tl.store(part, tl.sum(slope * x0, 0)[None, :], mask=ok)
    tl.store(part + C, tl.sum(slope * x1, 0)[None, :], mask=ok)
    tl.store(part + 2 * C, tl.sum(slope * x2, 0)[None, :], mask=ok)
    tl.store(part + 3 * C, tl.sum(slope * x3, 0)[None, :], mask=ok)
    tl.store(part + 4 * C, tl.sum(slope, 0)[None, :], mask=ok)


@triton.jit
def _conv_input_grad(du, weight, dx, T: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """dx[t] = sum over taps of weight * du[t + 3 - tap]. Same tiles as the forward pass."""
    row = tl.program_id(0).to(tl.int64)
    t = (tl.program_id(1) * BT + tl.arange(0, BT))[:, None]
    c = (tl.program_id(2) * BC + tl.arange(0, BC))[None, :]
    ok = c < C
    grad = tl.zeros((BT, BC), tl.float32)
    for tap in tl.static_range(4):
        grad += tl.load(weight + c * 4 + tap, mask=ok) * _conv_tap(du + row * T * C, t + 3 - tap, c, ok, T, C)
    tl.store(dx + row * T * C + t * C + c, grad.to(dx.dtype.element_ty), mask=ok & (t < T))


CONV_TILE = (32, 64)  # positions, channels of one program


def _conv_grid(x: torch.Tensor) -> tuple[int, int, int]:
    return x.shape[0], triton.cdiv(x.shape[1], CONV_TILE[0]), triton.cdiv(x.shape[2], CONV_TILE[1])


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x [B,T,C] itself when it is a column slice of a contiguous tensor, else a copy."""
    return x if x.stride(2) == 1 and x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()


@torch.library.custom_op("train_causal_conv::conv_silu", mutates_args=())
def conv_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """silu of the causal depthwise convolution by Triton: x [B,T,C], weight fp32 [C,4], bias fp32 [C]."""
    x = _rows_contiguous(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _conv_forward[_conv_grid(x)](
        x, weight.contiguous(), bias, y, x.stride(1), x.shape[1], x.shape[2], *CONV_TILE, num_warps=4
    )
    return y


@torch.library.custom_op("train_causal_conv::conv_silu_grad", mutates_args=())
def conv_silu_grad(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `conv_silu`: dx [B,T,C] and the weight's and bias's together, fp32 [5,C]."""
    x, dy = _rows_contiguous(x), dy.contiguous()
    weight, grid = weight.contiguous(), _conv_grid(x)
    du, dx = torch.empty_like(dy), torch.empty_like(dy)
    dw = torch.empty(grid[0] * grid[1], 5, x.shape[2], dtype=torch.float32, device=x.device)
    _conv_slopes[grid](x, weight, bias, dy, du, dw, x.stride(1), x.shape[1], x.shape[2], *CONV_TILE)
    _conv_input_grad[grid](du, weight, dx, x.shape[1], x.shape[2], *CONV_TILE)
    return dx, dw.sum(0)


@conv_silu.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@conv_silu_grad.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.new_empty(x.shape), weight.new_empty(5, x.shape[2])


def _conv_save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _conv_grads(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    dx, dw = conv_silu_grad(*ctx.saved_tensors, dy)
    return dx, dw[:4].mT, dw[4]


conv_silu.register_autograd(_conv_grads, setup_context=_conv_save)


def causal_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Depthwise causal convolution and SiLU in x's dtype: x [B,T,C], weight [C,1,4], bias [C]."""
    if x.is_cuda:
        return conv_silu(x, weight[:, 0], bias)
    padded, length = F.pad(x, (0, 0, 3, 0)), x.shape[1]
    taps = [padded[:, i : i + length] * weight[:, 0, i] for i in range(4)]
    return F.silu(sum(taps[1:], taps[0]) + bias)
