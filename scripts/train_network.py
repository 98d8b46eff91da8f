"""The network that `train_default_model.py` trains: nemotron_h layers and an MTP head, as plain functions.

This module owns the forward pass and the losses. It knows nothing about data, optimisers or files.
Layers of one kind share one compiled function.

Shapes: B rows, T tokens, D hidden size, H heads of P channels, G groups, N state size, L chunk.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from train_causal_conv import causal_conv
from train_parameters import CONFIG, MIXER_WEIGHTS, Params

MTP_DEPTHS = 3
SCAN_CHUNK = 64


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm over the last axis in fp32, returned in x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + CONFIG["layer_norm_epsilon"])
    return (y * weight).to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in x's dtype (weights are kept in fp32)."""
    return F.linear(x, weight.to(x.dtype))


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
