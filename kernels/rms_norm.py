"""RMS norms, a row at a time, in fp32. Rounding follows transformers' NemotronH: weight times value, then one cast.

On a GPU a row is one program, whose order of addition follows from the row's width: one binary a width and dtype, for
a norm with and without the addition before it.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mambalign.kernels.activation import silu_of
from mambalign.kernels.dependent_launch import pdl, wait_for_inputs

PIECE = 256  # rows normed at a time on a CPU, so that they stay in the processor's cache
WORD_BYTES = 16  # widest load of a thread
HEAD_CHANNELS = 1024  # of a program that norms heads


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, D] over its root mean square, times weight [D] (fp32). Returns the dtype of x. Rows may be apart.

    out: where to write; its rows may be apart too.
    """
    if x.is_cuda:
        return rms_norm_on_gpu(x, None, weight, eps, out)[0]
    normed = F.rms_norm(x.float(), (x.shape[1],), weight, eps).to(x.dtype)
    return normed if out is None else out.copy_(normed)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), the sum rounded to the dtype of residual [T, D] before it is normed.

    The bits are those of the two steps; neither is changed. x: [T, D] of the dtype of residual; or, on a GPU, the
    [segments, T, D] fp32 that a linear layer left (`linear_for_sum`), which are added in order and rounded first.
    """
    if x.is_cuda:
        return rms_norm_on_gpu(x, residual, weight, eps)
    total = x + residual
    return rms_norm(total, weight, eps), total


def rms_norm_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_width: int
) -> torch.Tensor:
    """rms_norm(x * silu(gate)) within groups of `group_width` channels.

    x [T, D] fp32 (what a scan leaves); gate [T, D]; weight [D] fp32. Returns [T, D] in the dtype of gate.
    """
    if x.is_cuda:
        return rms_norm_gated_on_gpu(x, gate, weight, eps, group_width)
    if len(x) <= PIECE:
        return _gated_piece(x, gate, weight, eps, group_width)
    pieces = zip(x.split(PIECE), gate.split(PIECE), strict=True)
    return torch.cat([_gated_piece(*piece, weight, eps, group_width) for piece in pieces])


def _gated_piece(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_width: int
) -> torch.Tensor:
    """As few operations as it takes: at a few rows each costs its launch."""
    gate32 = gate.float()
    gated = torch.mul(gate32, x).div_(gate32.neg().exp_().add_(1.0))
    groups = gated.view(-1, group_width)
    groups.mul_(groups.square().mean(1, keepdim=True).add_(eps).rsqrt_())
    return gated.mul_(weight).to(gate.dtype)


def rms_norm_then_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """rms_norm(x) of each head by itself, times silu(gate).

    x [T, heads, width] fp32 (what a scan leaves); gate [T, heads * width], rows may be apart; weight [width] fp32, of
    every head. Returns [T, heads * width] in the dtype of gate.
    """
    if x.is_cuda:
        return rms_norm_then_gate_on_gpu(x, gate, weight, eps)
    gate32 = gate.float()
    normed = F.rms_norm(x, x.shape[2:], weight, eps).view(gate.shape)
    return normed.mul_(gate32).div_(gate32.neg().exp_().add_(1.0)).to(gate.dtype)


@triton.jit(do_not_specialize=["x_stride", "segment_stride", "residual_stride", "residual_width", "out_stride"])
def rms_norm_kernel(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_total,
    x_stride,
    segment_stride,
    residual_stride,
    residual_width,
    out_stride,
    eps,
    SEGMENTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
    PDL: tl.constexpr,
):
    """total = x + residual, rounded; out = weight * (total * rsqrt(mean(total^2) + eps)), rounded.

    Grid: rows; a program owns one. Reads x, residual, weight; writes out, and total where there is a residual. fp32.
    `residual_width` is D, or 0 without a residual: a run-time value, so that both cases are the same instructions.
    WORD divides it and the strides. With SEGMENTS x is that many sums of a product, which are added and rounded first.
    """
    wait_for_inputs(PDL)
    i_row, o_d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_d, is_sum = o_d < D, o_d < residual_width // WORD * WORD
    p_x += i_row * (x_stride // WORD * WORD) + o_d
    if SEGMENTS > 0:
        b_sum = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(SEGMENTS):
            b_sum += tl.load(p_x + i * (segment_stride // WORD * WORD).to(tl.int64), mask=is_d, other=0.0)
        b_x = b_sum.to(p_out.dtype.element_ty)
    else:
        b_x = tl.load(p_x, mask=is_d, other=0.0)
    p_residual += i_row * (residual_stride // WORD * WORD) + o_d
    b_residual = tl.load(p_residual, mask=is_sum, other=0.0)
    b_total = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(p_total.dtype.element_ty)
    b_total = tl.where(is_sum, b_total, b_x)
    tl.store(p_total + i_row * D + o_d, b_total, mask=is_sum)
    b_value = b_total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_value * b_value, axis=0) / D + eps)
    b_out = tl.load(p_weight + o_d, mask=is_d, other=0.0) * (b_value * scale)
    p_out += i_row * (out_stride // WORD * WORD) + o_d
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=is_d)


def rms_norm_on_gpu(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, x + residual), or (normed, normed) without a residual. normed is `out`, if given."""
    num_segments, (num_rows, width) = len(x) if x.dim() == 3 else 0, x.shape[-2:]
    like = x if residual is None else residual
    word = _word(like, width)
    is_own = out is None or not _is_aligned(out, word)
    normed = torch.empty(num_rows, width, dtype=like.dtype, device=x.device) if is_own else out
    total = normed if residual is None else torch.empty(num_rows, width, dtype=like.dtype, device=x.device)
    if not num_segments:
        x = _aligned_rows(x, word)
    other = x if residual is None else _aligned_rows(residual, word)
    block = triton.next_power_of_2(width)
    if num_rows:
        rms_norm_kernel[(num_rows,)](
            x, other, weight, normed, total,
            x.stride(-2), x.stride(0), other.stride(0), 0 if residual is None else width, normed.stride(0), eps,
            SEGMENTS=num_segments, D=width, BLOCK=block, WORD=word, num_warps=min(8, max(1, block // 512)),
            **pdl(x.device),
        )  # fmt: skip
    if is_own and out is not None:
        normed = out.copy_(normed)
    return normed, total


def norm_adds_segments(num_segments: int, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `add_rms_norm` has the same bits given segments as given their sum: it is compiled twice."""
    generator = torch.Generator(device).manual_seed(width)
    sums = torch.randn(num_segments, 64, width, generator=generator, device=device)
    sums *= torch.exp2(torch.randint(-8, 9, sums.shape, generator=generator, device=device).float())
    residual = torch.randn(64, width, generator=generator, device=device).to(dtype)
    weight, total = torch.rand(width, generator=generator, device=device), torch.zeros_like(sums[0])
    for part in sums:
        total += part
    got, want = (rms_norm_on_gpu(x, residual, weight, 1e-5) for x in (sums, total.to(dtype)))
    return all(map(torch.equal, got, want))


@triton.jit(do_not_specialize=["x_stride", "gate_stride"])
def rms_norm_gated_kernel(
    p_x,
    p_gate,
    p_weight,
    p_out,
    x_stride,
    gate_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
    PDL: tl.constexpr,
):
    """v = x * silu(gate); out = weight * (v * rsqrt(mean(v^2 of its group) + eps)), rounded to the dtype of gate.

    Grid: (rows, groups); a program owns the WIDTH channels of one group of a row.
    Reads x (fp32), gate, weight; writes out. fp32. WORD divides the strides.
    """
    wait_for_inputs(PDL)
    i_row, i_group, o_d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    is_d, o_channel = o_d < WIDTH, i_group * WIDTH + o_d
    b_x = tl.load(p_x + i_row * (x_stride // WORD * WORD) + o_channel, mask=is_d, other=0.0)
    b_gate = tl.load(p_gate + i_row * (gate_stride // WORD * WORD) + o_channel, mask=is_d, other=0.0)
    b_value = b_x * silu_of(b_gate.to(tl.float32))
    scale = tl.rsqrt(tl.sum(b_value * b_value, axis=0) / WIDTH + eps)
    b_out = tl.load(p_weight + o_channel, mask=is_d, other=0.0) * (b_value * scale)
    p_out += i_row * (tl.num_programs(1) * WIDTH) + o_channel
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=is_d)


def rms_norm_gated_on_gpu(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_width: int
) -> torch.Tensor:
    """The kernel behind `rms_norm_gated`."""
    num_rows, width = x.shape
    out = torch.empty(num_rows, width, dtype=gate.dtype, device=x.device)
    word = _word(gate, group_width)
    x, gate = _aligned_rows(x, word), _aligned_rows(gate, word)
    block = triton.next_power_of_2(group_width)
    if num_rows:
        rms_norm_gated_kernel[(num_rows, width // group_width)](
            x, gate, weight, out, x.stride(0), gate.stride(0), eps,
            WIDTH=group_width, BLOCK=block, WORD=word, num_warps=min(8, max(1, block // 256)), **pdl(x.device),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["gate_stride"])
def rms_norm_then_gate_kernel(
    p_x, p_gate, p_weight, p_out, gate_stride, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr, WORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = weight * (x * rsqrt(mean(x^2 of its head) + eps)) * silu(gate), rounded to the dtype of gate.

    Grid: (rows, blocks of heads); a program owns the WIDTH channels of BLOCK_H heads of a row.
    Reads x (fp32), gate, weight; writes out. fp32. WORD divides the stride of the gate.
    """
    wait_for_inputs(PDL)
    i_row, o_d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_in, o_channel = (o_h < HEADS)[:, None] & (o_d < WIDTH)[None, :], o_h[:, None] * WIDTH + o_d[None, :]
    o_out = i_row * (HEADS * WIDTH) + o_channel
    b_x = tl.load(p_x + o_out, mask=is_in, other=0.0)
    b_gate = tl.load(p_gate + i_row * (gate_stride // WORD * WORD) + o_channel, mask=is_in, other=0.0)
    b_weight = tl.load(p_weight + o_d, mask=o_d < WIDTH, other=0.0)
    b_out = b_weight[None, :] * (b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=1) / WIDTH + eps)[:, None])
    tl.store(p_out + o_out, (b_out * silu_of(b_gate.to(tl.float32))).to(p_out.dtype.element_ty), mask=is_in)


def rms_norm_then_gate_on_gpu(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The kernel behind `rms_norm_then_gate`."""
    num_rows, num_heads, width = x.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    word = _word(gate, width)
    gate, block = _aligned_rows(gate, word), triton.next_power_of_2(width)
    block_h = heads_for(num_heads, block)
    if num_rows:
        rms_norm_then_gate_kernel[(num_rows, triton.cdiv(num_heads, block_h))](
            x.contiguous(), gate, weight, out, gate.stride(0), eps,
            HEADS=num_heads, WIDTH=width, BLOCK_H=block_h, BLOCK=block, WORD=word,
            num_warps=max(1, min(8, block_h * block // 256)), **pdl(x.device),
        )  # fmt: skip
    return out


def heads_for(num_heads: int, block: int) -> int:
    """Heads of `block` channels that a program takes: with one each, a prompt's programs take longer to launch than
    to run."""
    return min(triton.next_power_of_2(num_heads), max(1, HEAD_CHANNELS // block))


def _word(x: torch.Tensor, width: int) -> int:
    """Elements of a thread's load: by dtype and width alone, since the order of addition follows from it."""
    word = WORD_BYTES // x.element_size()
    return word if width % word == 0 else 1


def _aligned_rows(x: torch.Tensor, word: int) -> torch.Tensor:
    """x, or a copy where its rows do not begin on the boundary that the kernel was compiled for."""
    return x if _is_aligned(x, word) else x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: torch.Tensor, word: int) -> bool:
    return x.stride(1) == 1 and x.stride(0) % word == 0 and x.data_ptr() % WORD_BYTES == 0
