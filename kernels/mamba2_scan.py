"""The Mamba-2 recurrence over paged temporal states.

Formula (arXiv 2405.21060, section 2; names as in the published checkpoints), per head, in fp32:

    dt_t = max(softplus(dt_raw_t + dt_bias), dt_min)
    h_t  = exp(dt_t * A) * h_{t-1} + (dt_t * x_t) outer B_t        h [head_dim, d_state]
    y_t  = h_t C_t + D * x_t

One loop over the tokens of a row serves prefill, decode, the verification of drafts and the states at boundaries, so
a row's bits do not depend on how its tokens were cut into steps. A 16-bit state is rounded to its dtype after every
token, in the loop as in memory, so that a cut changes nothing.
"""

import torch

from mambalign.kernels.activation import softplus
from mambalign.kernels.mamba2_scan_triton import mamba2_scan_varlen_triton
from mambalign.kernels.rows import MambaRows, walk_tokens


def mamba2_scan_varlen_reference(
    x: torch.Tensor,
    dt_raw: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_min: float,
    temporal_state: torch.Tensor,
    rows: MambaRows,
) -> torch.Tensor:
    """Run the recurrence over every row from the state in its temporal_block, or zeros; leave the states asked for.

    x [T, heads, head_dim]; dt_raw [T, heads]; B, C [T, groups, d_state], head h using group h // (heads / groups); the
    tokens of these may lie further apart than they are wide. A (negative), D, dt_bias [heads], fp32. temporal_state
    [blocks, heads, head_dim, d_state], fp32 or 16 bit, updated in place: the state after token t in state_block[t], if
    that is not negative. Returns y [T, heads, head_dim] in fp32; undefined for tokens of no row.
    """
    per_group = x.shape[1] // B.shape[1]
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)

    def inputs(token: int) -> tuple[torch.Tensor, ...]:
        dt = softplus(dt_raw[token] + dt_bias).clamp(min=dt_min)
        return B[token].float(), x[token].float(), dt, torch.exp(dt * A)

    def advance(state, b_B, b_x, dt, decay) -> torch.Tensor:
        update = (dt[:, None] * b_x)[:, :, None] * b_B.repeat_interleave(per_group, 0)[:, None, :]
        return (state * decay[:, None, None] + update).to(temporal_state.dtype).float()

    def emit(token: int, state: torch.Tensor) -> None:
        b_C = C[token].float().repeat_interleave(per_group, 0)
        y[token] = (state * b_C[:, None, :]).sum(-1) + D[:, None] * x[token].float()

    walk_tokens(rows, temporal_state, inputs, advance, emit)
    return y


def mamba2_scan_varlen(
    x: torch.Tensor,
    dt_raw: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_min: float,
    temporal_state: torch.Tensor,
    rows: MambaRows,
) -> torch.Tensor:
    """`mamba2_scan_varlen_reference`, fast: no host value but those of `rows` is looked at."""
    assert temporal_state.is_contiguous() and A.dtype == D.dtype == dt_bias.dtype == torch.float32
    arguments = (x, dt_raw, B, C, A, D, dt_bias, dt_min, temporal_state, rows)
    if x.is_cuda:
        return mamba2_scan_varlen_triton(*arguments)
    if temporal_state.dtype == torch.float32:
        from mambalign.kernels.cpu import scan  # compiles: not where a GPU serves

        return scan.mamba2_scan(*arguments)
    return mamba2_scan_varlen_reference(*arguments)
