"""The gated delta rule over paged temporal states.

Formula (arXiv 2412.06464, section 3; names as in the published checkpoints), per value head, in fp32, with key and
query of a token over their lengths, and the query over sqrt(k_dim):

    decay_t = exp(softplus(a_t + dt_bias) * A),  beta_t = sigmoid(b_t)
    d_t = beta_t * (v_t - decay_t * h_{t-1} k_t)
    h_t = decay_t * h_{t-1} + d_t outer k_t                          h [v_dim, k_dim]
    o_t = h_t q_t = decay_t * h_{t-1} q_t + d_t * (k_t . q_t)

Both products with a state are taken before it changes, so that it is read once a token. One loop over the tokens of a
row serves prefill, decode, the verification of drafts and the states at boundaries, so a row's bits do not depend on
how its tokens were cut into steps. A 16-bit state is rounded to its dtype after every token, in the loop as in memory.
"""

import torch

from mambalign.kernels.activation import softplus
from mambalign.kernels.gated_delta_rule_triton import NORM_EPS, gated_delta_rule_varlen_triton
from mambalign.kernels.rows import MambaRows, walk_tokens


def gated_delta_rule_varlen_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a_raw: torch.Tensor,
    b_raw: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    temporal_state: torch.Tensor,
    rows: MambaRows,
) -> torch.Tensor:
    """Run the rule over every row from the state in its temporal_block, or zeros; leave the states asked for.

    q, k [T, key_heads, k_dim]; v [T, heads, v_dim], head h using key head h // (heads / key_heads); a_raw, b_raw
    [T, heads]; the tokens of these may lie further apart than they are wide. A (negative), dt_bias [heads], fp32.
    temporal_state [blocks, heads, v_dim, k_dim], fp32 or 16 bit, updated in place: the state after token t in
    state_block[t], if that is not negative. Returns o [T, heads, v_dim] in fp32; undefined for tokens of no row.
    """
    per_key_head, k_dim = v.shape[1] // k.shape[1], k.shape[2]
    o = torch.zeros(v.shape, dtype=torch.float32, device=v.device)

    def inputs(token: int) -> tuple[torch.Tensor, ...]:
        decay = torch.exp(softplus(a_raw[token] + dt_bias) * A)
        return unit(k[token].float()), v[token].float(), decay, torch.sigmoid(b_raw[token].float())

    def advance(state, b_k, b_v, decay, beta) -> torch.Tensor:
        b_k, decay = b_k.repeat_interleave(per_key_head, 0)[:, None], decay[:, None]
        delta = (b_v - decay * (state * b_k).sum(-1)) * beta[:, None]
        return state * decay[:, :, None] + delta[:, :, None] * b_k

    def emit(token: int, state: torch.Tensor) -> None:
        b_q = unit(q[token].float()).repeat_interleave(per_key_head, 0)
        o[token] = (state * b_q[:, None]).sum(-1) * k_dim**-0.5

    walk_tokens(rows, temporal_state, inputs, advance, emit)
    return o


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors [.., width] over their lengths."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def gated_delta_rule_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a_raw: torch.Tensor,
    b_raw: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    temporal_state: torch.Tensor,
    rows: MambaRows,
) -> torch.Tensor:
    """`gated_delta_rule_varlen_reference`, fast: no host value but those of `rows` is looked at."""
    assert temporal_state.is_contiguous() and A.dtype == dt_bias.dtype == torch.float32
    arguments = (q, k, v, a_raw, b_raw, A, dt_bias, temporal_state, rows)
    if v.is_cuda:
        return gated_delta_rule_varlen_triton(*arguments)
    if temporal_state.dtype == torch.float32:
        from mambalign.kernels.cpu import gated_delta  # compiles: not where a GPU serves

        return gated_delta.gated_delta_rule(*arguments)
    return gated_delta_rule_varlen_reference(*arguments)


def compile_for(device: torch.device | str) -> None:
    """Compile what a CPU needs, as a model is loaded: not in a request."""
    if torch.device(device).type == "cpu":
        from mambalign.kernels.cpu import gated_delta  # noqa: F401
