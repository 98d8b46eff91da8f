"""The network that `train_default_model.py` trains: nemotron_h layers and an MTP head, as plain functions.

This module owns the forward pass and the losses. It knows nothing about data, optimisers or files.
Parameters live in one dict under their published names (`backbone.*`, `lm_head.weight`, `mtp.layers.*`),
so that what is trained is what is saved. Layers of one kind share one compiled function.

Shapes: B rows, T tokens, D hidden size, H heads of P channels, G groups, N state size, L chunk.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Params = dict[str, torch.Tensor]

MTP_DEPTHS = 3
SCAN_CHUNK = 64

CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 11,
    "hybrid_override_pattern": "M-M*-M-M*M-",
    "num_attention_heads": 4,
    "head_dim": 64,
    "attention_head_dim": 64,
    "num_key_value_heads": 2,
    "mlp_hidden_act": "relu2",
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "residual_in_fp32": False,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": None,
    "max_position_embeddings": 4096,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "ssm_state_size": 64,
    "mamba_num_heads": 8,
    "n_groups": 2,
    "mamba_head_dim": 64,
    "conv_kernel": 4,
    "expand": 2,
    "mamba_hidden_act": "silu",
    "time_step_min": 1e-06,
    "time_step_max": 0.1,
    "time_step_floor": 0.0001,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "chunk_size": 128,
    "rescale_prenorm_residual": True,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*-",
}

MIXER_WEIGHTS = {
    "M": (
        "in_proj.weight",
        "conv1d.weight",
        "conv1d.bias",
        "dt_bias",
        "A_log",
        "D",
        "norm.weight",
        "out_proj.weight",
    ),
    "*": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"),
    "-": ("up_proj.weight", "down_proj.weight"),
}


def parameter_shapes(config: dict[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of the checkpoint, under its published name."""
    dim, vocab = config["hidden_size"], config["vocab_size"]
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    conv_dim = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    heads = (config["mamba_num_heads"],)
    q_dim = config["num_attention_heads"] * config["head_dim"]
    kv_dim = config["num_key_value_heads"] * config["head_dim"]
    mixers = {
        "M": (
            (inner + conv_dim + heads[0], dim),
            (conv_dim, 1, config["conv_kernel"]),
            (conv_dim,),
            heads,
            heads,
            heads,
            (inner,),
            (dim, inner),
        ),
        "*": ((q_dim, dim), (kv_dim, dim), (kv_dim, dim), (dim, q_dim)),
        "-": ((config["intermediate_size"], dim), (dim, config["intermediate_size"])),
    }
    shapes: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (vocab, dim)}
    for prefix, pattern in (
        ("backbone.layers", config["hybrid_override_pattern"]),
        ("mtp.layers", config["mtp_hybrid_override_pattern"]),
    ):
        for index, kind in enumerate(pattern):
            shapes[f"{prefix}.{index}.norm.weight"] = (dim,)
            for name, shape in zip(MIXER_WEIGHTS[kind], mixers[kind], strict=True):
                shapes[f"{prefix}.{index}.mixer.{name}"] = shape
    shapes["backbone.norm_f.weight"] = (dim,)
    shapes["lm_head.weight"] = (vocab, dim)
    shapes["mtp.layers.0.eh_proj.weight"] = (dim, 2 * dim)
    shapes["mtp.layers.0.enorm.weight"] = (dim,)
    shapes["mtp.layers.0.hnorm.weight"] = (dim,)
    shapes["mtp.layers.1.final_layernorm.weight"] = (dim,)
    return shapes


def init_parameters(config: dict[str, Any], seed: int, device: str) -> Params:
    """Fresh fp32 weights. Projections back into the residual stream and the head start small or at zero."""
    gen = torch.Generator().manual_seed(seed)
    params: Params = {}
    for name, shape in sorted(parameter_shapes(config).items()):
        leaf = name.split("mixer.")[-1]
        if leaf == "A_log":
            value = torch.empty(shape).uniform_(1, 16, generator=gen).log()
        elif leaf == "dt_bias":
            low, high = math.log(1e-3), math.log(1e-1)
            step = torch.exp(low + (high - low) * torch.rand(shape, generator=gen))
            value = step + torch.log(-torch.expm1(-step))
        elif leaf == "conv1d.bias" or leaf in ("out_proj.weight", "o_proj.weight", "down_proj.weight"):
            value = torch.zeros(shape)
        elif leaf == "conv1d.weight":
            value = torch.empty(shape).uniform_(-0.5, 0.5, generator=gen)
        elif leaf == "D" or len(shape) == 1:
            value = torch.ones(shape)
        elif name == "backbone.embeddings.weight":
            value = torch.randn(shape, generator=gen)
        elif name == "lm_head.weight":
            value = torch.randn(shape, generator=gen) * 1e-3
        else:
            value = torch.randn(shape, generator=gen) * 0.7 / math.sqrt(shape[1])
        params[name] = value.to(device).requires_grad_(True)
    return params


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm over the last axis in fp32, returned in x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + CONFIG["layer_norm_epsilon"])
    return (y * weight).to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in x's dtype (weights are kept in fp32)."""
    return F.linear(x, weight.to(x.dtype))


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


@torch.library.custom_op("train_network::conv_silu", mutates_args=())
def conv_silu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """silu of the causal depthwise convolution by Triton: x [B,T,C], weight fp32 [C,4], bias fp32 [C]."""
    x = _rows_contiguous(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _conv_forward[_conv_grid(x)](
        x, weight.contiguous(), bias, y, x.stride(1), x.shape[1], x.shape[2], *CONV_TILE, num_warps=4
    )
    return y


@torch.library.custom_op("train_network::conv_silu_grad", mutates_args=())
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


def chunked_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Mamba-2's chunked scan (state space duality, arXiv 2405.21060, section 6) by matrix products in `dtype`.

    x [B,T,G,R,P] (R heads a group), dt and decay = A*dt [B,T,G,R], b and c [B,T,G,N]; T a multiple of L.
    Returns y [B,T,G,R,P] in `dtype`, y_t = c_t . S_t with S_t = exp(decay_t) S_{t-1} + b_t (dt_t x_t)^T.
    """
    rows, length, groups, ratio, width = x.shape
    chunk, state = min(SCAN_CHUNK, length), b.shape[-1]
    num_chunks = length // chunk
    heads = groups * ratio

    def chunks(t: torch.Tensor) -> torch.Tensor:  # [B,T,G,...] -> [B*chunks, G, L, ...]
        return t.reshape(rows * num_chunks, chunk, *t.shape[2:]).transpose(1, 2)

    x_dt = chunks(x * dt[..., None])
    total = chunks(decay).float().cumsum(2)  # [BC,G,L,R], log decay since the chunk's start
    b, c = chunks(b).to(dtype).contiguous(), chunks(c).to(dtype).contiguous()
    per_head = total.transpose(2, 3)  # [BC,G,R,L]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    between = (per_head[..., :, None] - per_head[..., None, :]).masked_fill(~causal, -math.inf).exp()
    scores = torch.matmul(c, b.transpose(2, 3))  # [BC,G,L,L]
    mixing = (scores[:, :, None].float() * between).to(dtype)
    inside = torch.matmul(mixing, x_dt.permute(0, 1, 3, 2, 4).to(dtype))  # [BC,G,R,L,P]

    to_end = (total[:, :, -1:] - total).exp()  # [BC,G,L,R]
    fed = (x_dt * to_end[..., None]).to(dtype).reshape(-1, groups, chunk, ratio * width)
    added = torch.matmul(b.transpose(2, 3), fed)  # [BC,G,N,R*P], what each chunk adds to the state
    added = added.view(rows, num_chunks, groups, state, ratio, width).permute(0, 2, 4, 1, 3, 5)
    span = per_head[..., -1].reshape(rows, num_chunks, heads).transpose(1, 2).cumsum(2)  # [B,H,chunks]
    before = torch.ones(num_chunks, num_chunks, dtype=torch.bool, device=x.device).tril(-1)
    start = F.pad(span, (1, -1))  # log decay up to the start of each chunk
    carry = (start[..., :, None] - span[..., None, :]).masked_fill(~before, -math.inf).exp().to(dtype)
    states = torch.matmul(carry, added.reshape(rows, heads, num_chunks, state * width))
    states = states.view(rows, groups, ratio, num_chunks, state, width).permute(0, 3, 1, 4, 2, 5)
    carried = torch.matmul(c, states.reshape(-1, groups, state, ratio * width))
    carried = carried.view(-1, groups, chunk, ratio, width) * total.exp()[..., None]
    y = inside.permute(0, 1, 3, 2, 4) + carried
    return y.to(dtype).transpose(1, 2).reshape(rows, length, groups, ratio, width)


def mamba_block(
    x: torch.Tensor,
    norm: torch.Tensor,
    in_proj: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    skip: torch.Tensor,
    gated_norm: torch.Tensor,
    out_proj: torch.Tensor,
) -> torch.Tensor:
    """Residual Mamba-2 layer on x [B,T,D]."""
    rows, length, _ = x.shape
    groups, heads, state = CONFIG["n_groups"], CONFIG["mamba_num_heads"], CONFIG["ssm_state_size"]
    width, inner = CONFIG["mamba_head_dim"], gated_norm.shape[0]
    gate, xbc, dt = linear(rms_norm(x, norm), in_proj).split([inner, inner + 2 * groups * state, heads], -1)
    xbc = causal_conv(xbc, conv_weight, conv_bias)
    inputs, b, c = xbc.split([inner, groups * state, groups * state], -1)
    dt = F.softplus(dt.float() + dt_bias).clamp(min=CONFIG["time_step_min"])
    inputs = inputs.reshape(rows, length, groups, heads // groups, width)
    dt = dt.view(rows, length, groups, heads // groups)
    decay = dt * -a_log.exp().view(groups, -1)
    y = chunked_scan(
        inputs, dt, decay, b.reshape(rows, length, groups, state), c.reshape(rows, length, groups, state), x.dtype
    )
    y = (y.float() + inputs * skip.view(groups, -1, 1)).reshape(rows, length, groups, inner // groups)
    y = y * F.silu(gate.float()).view_as(y)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + CONFIG["layer_norm_epsilon"])
    return x + linear((y.reshape(rows, length, inner) * gated_norm).to(x.dtype), out_proj)


def split_heads(x: torch.Tensor) -> torch.Tensor:
    """[B,T,H*P] -> [B,H,T,P]."""
    return x.view(x.shape[0], x.shape[1], -1, CONFIG["head_dim"]).transpose(1, 2)


def attention_block(
    x: torch.Tensor,
    norm: torch.Tensor,
    q_proj: torch.Tensor,
    k_proj: torch.Tensor,
    v_proj: torch.Tensor,
    o_proj: torch.Tensor,
) -> torch.Tensor:
    """Residual causal attention layer (grouped queries, no positional encoding) on x [B,T,D]."""
    y = rms_norm(x, norm)
    q, k, v = (split_heads(linear(y, w)) for w in (q_proj, k_proj, v_proj))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return x + linear(y.transpose(1, 2).flatten(2), o_proj)


def mlp_block(x: torch.Tensor, norm: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Residual squared-ReLU MLP on x [...,D]."""
    return x + linear(F.relu(linear(rms_norm(x, norm), up)).square(), down)


def main_head(
    x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Final norm, logits and cross entropy: x [B,T,D], targets [B,T] -> (loss per token, h, logits)."""
    h = rms_norm(x, norm)
    logits = linear(h, head)
    wide = logits.float()
    loss = wide.logsumexp(-1) - wide.gather(-1, targets[..., None]).squeeze(-1)
    return loss, h, logits


def draft_head(
    f: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor, soft: torch.Tensor
) -> torch.Tensor:
    """Mean loss of one draft position: `soft` [T] of it against the main model's distribution, the rest against
    the true token. f [B,T,D] is the MTP output after its final norm, teacher [B,T,V] the main logits."""
    logits = linear(f, head).float()
    total = logits.logsumexp(-1)
    hard = total - logits.gather(-1, targets[..., None]).squeeze(-1)
    mimic = total - (teacher.float().softmax(-1) * logits).sum(-1)
    return (hard + (mimic - hard) * soft).mean()


def mtp_inputs(
    h: torch.Tensor,
    embedding: torch.Tensor,
    enorm: torch.Tensor,
    hnorm: torch.Tensor,
    eh_proj: torch.Tensor,
    norm: torch.Tensor,
    q_proj: torch.Tensor,
    k_proj: torch.Tensor,
    v_proj: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The MTP head up to its attention: (residual x, q, k, v) from hidden states h and next tokens' embeddings."""
    x = linear(torch.cat([rms_norm(embedding, enorm), rms_norm(h, hnorm)], -1), eh_proj)
    y = rms_norm(x, norm)
    return x, *(split_heads(linear(y, w)) for w in (q_proj, k_proj, v_proj))


def mtp_outputs(
    x: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask | torch.Tensor,
    o_proj: torch.Tensor,
    norm: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    final: torch.Tensor,
) -> torch.Tensor:
    """The MTP head from its attention on: the output after `final_layernorm`. A dense mask is the eager form."""
    if isinstance(mask, torch.Tensor):
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    else:
        y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    x = x + linear(y.transpose(1, 2).flatten(2), o_proj)
    return rms_norm(mlp_block(x, norm, up, down), final)


def chain_masks(length: int, device: torch.device, dense: bool) -> list[BlockMask | torch.Tensor]:
    """One attention mask per draft depth over keys laid out [depth 0 | depth 1 | depth 2], each T long.

    Depth d of position p sees the depth-0 keys up to p, and the keys of its own chain at depths 1..d: what a
    drafter with a KV cache sees. Unused depths are masked by whole blocks, so every depth runs one kernel.
    """

    def chain(_b: Any, _h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return ((kv < length) & (kv <= q)) | ((kv >= length) & (kv % length == q))

    masks: list[BlockMask | torch.Tensor] = []
    for depth in range(MTP_DEPTHS):
        limit = (depth + 1) * length

        def within(_b: Any, _h: Any, q: torch.Tensor, kv: torch.Tensor, limit: int = limit) -> torch.Tensor:
            return chain(_b, _h, q, kv) & (kv < limit)

        if dense:
            q = torch.arange(length, device=device)[:, None]
            kv = torch.arange(MTP_DEPTHS * length, device=device)[None]
            masks.append(within(0, 0, q, kv))
        else:
            mask = create_block_mask(within, None, None, length, MTP_DEPTHS * length, device=str(device))
            mask.mask_mod = chain
            masks.append(mask)
    return masks


class Network:
    """Forward passes over one parameter dict; `compiled` says whether the layer functions go through inductor."""

    def __init__(self, params: Params, dtype: torch.dtype, compiled: bool) -> None:
        self.params, self.dtype, self.compiled = params, dtype, compiled

        def ready(function: Any) -> Any:
            return torch.compile(function, dynamic=False) if compiled else function

        self.blocks = {"M": ready(mamba_block), "*": ready(attention_block), "-": ready(mlp_block)}
        self.main_head, self.draft_head = ready(main_head), ready(draft_head)
        self.mtp_inputs, self.mtp_outputs = ready(mtp_inputs), ready(mtp_outputs)
        self.masks: dict[int, list[BlockMask | torch.Tensor]] = {}

    def layer_weights(self, prefix: str, kind: str) -> list[torch.Tensor]:
        """A layer's norm and mixer weights in the order its block function takes them."""
        return [self.params[f"{prefix}.norm.weight"]] + [
            self.params[f"{prefix}.mixer.{name}"] for name in MIXER_WEIGHTS[kind]
        ]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [B,T,D] of tokens [B,T] in the compute dtype."""
        return F.embedding(tokens, self.params["backbone.embeddings.weight"]).to(self.dtype)

    def backbone(self, x: torch.Tensor) -> torch.Tensor:
        """Residual stream [B,T,D] before the final norm, from embeddings [B,T,D]."""
        for index, kind in enumerate(CONFIG["hybrid_override_pattern"]):
            x = self.blocks[kind](x, *self.layer_weights(f"backbone.layers.{index}", kind))
        return x

    def main(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss per token, hidden states after the final norm, logits) from embeddings x [B,T,D]."""
        head = self.params["backbone.norm_f.weight"], self.params["lm_head.weight"]
        return self.main_head(self.backbone(x), *head, targets)

    def drafts(self, h: torch.Tensor, embeddings: torch.Tensor) -> list[torch.Tensor]:
        """MTP outputs of every position p and depth d, fed the true tokens: each [B,T,D], after final_layernorm.

        h [B,T,D] are the main model's hidden states after its final norm; embeddings [B, >= T+MTP_DEPTHS, D]
        those of the row's tokens.
        Depth 0 of position p reads (h_p, token p+1) and predicts token p+2; depth d reads depth d-1's output
        and token p+1+d.
        """
        length = h.shape[1]
        if length not in self.masks:
            self.masks[length] = chain_masks(length, h.device, dense=not self.compiled)
        masks = self.masks[length]
        (norm, *qkvo), mlp = self.layer_weights("mtp.layers.0", "*"), self.layer_weights("mtp.layers.1", "-")
        fuse = [self.params[f"mtp.layers.0.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")]
        final = self.params["mtp.layers.1.final_layernorm.weight"]
        outputs: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for depth in range(MTP_DEPTHS):
            x, q, k, v = self.mtp_inputs(h, embeddings[:, depth + 1 : depth + 1 + length], *fuse, norm, *qkvo[:3])
            keys.append(k)
            values.append(v)
            unused = [torch.zeros_like(k)] * (MTP_DEPTHS - 1 - depth)
            h = self.mtp_outputs(
                x,
                q,
                torch.cat(keys + unused, 2),
                torch.cat(values + unused, 2),
                masks[depth],
                qkvo[3],
                *mlp,
                final,
            )
            outputs.append(h)
        return outputs
