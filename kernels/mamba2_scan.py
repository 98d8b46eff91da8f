"""The Mamba-2 recurrence over paged temporal states: the torch reference.

Formula (arXiv 2405.21060, section 2; names as in the published checkpoints), per head, in fp32:

    dt_t = max(softplus(dt_raw_t + dt_bias), dt_min)
    h_t  = exp(dt_t * A) * h_{t-1} + (dt_t * x_t) outer B_t        h [head_dim, d_state]
    y_t  = h_t C_t + D * x_t

One loop over the tokens of a row serves prefill, decode, the verification of drafts and the states at boundaries, so
a row's bits do not depend on how its tokens were cut into steps. Rows run side by side, longest first, so that those
still active at a token are a prefix. Tokens are taken in segments: what does not depend on the state (decay, outer
product) is made for a whole segment at once, and so is the output; only one fused multiply-add a token remains.

A 16-bit state is rounded to its dtype after every token, in the loop as in memory, so that a cut changes nothing.
"""

from dataclasses import dataclass

import torch

from mambalign.kernels.activation import softplus

SEGMENT_TOKENS = 16
SEGMENT_BYTES = 32 << 20  # most memory of one segment of states


@dataclass(frozen=True)
class ScanPlan:
    """Which row runs where, and which states it reads and leaves; shared by all layers of one forward pass."""

    num_tokens: int
    query_lens: list[int]  # [R], longest first: the order of rows in the loop
    live_rows: list[int]  # [longest row], rows that have a token t
    first_token: list[int]  # [R], index of each row's token 0 in the batch
    has_state: bool  # any row starts from a state
    read_row: torch.Tensor  # [.] rows with state, int64
    read_block: torch.Tensor
    writes: dict[int, list[tuple[int, int]]]  # token index in its row -> (row, block) to leave the state in


def plan_mamba2_scan(batch, device: torch.device | str = "cpu") -> ScanPlan:
    """Order the rows of a `MambaBatch` and look up their blocks.

    Decode row: token 0 continues from column running + num_accepted - 1, token j leaves its state in running + j.
    Prefill row: reads and leaves the running column, and a copy at each boundary.
    """
    starts, num_tokens = [], 0
    for query_len in batch.query_lens:
        starts.append(num_tokens)
        num_tokens += query_len
    order = sorted(range(len(starts)), key=lambda row: -batch.query_lens[row])
    place = {row: i for i, row in enumerate(order)}

    reads: list[tuple[int, int]] = []
    writes: dict[int, list[tuple[int, int]]] = {}
    for i, row in enumerate(order):
        blocks, column, query_len = batch.block_table[row], batch.running_column[row], batch.query_lens[row]
        if batch.has_state[row]:
            reads.append((i, blocks[column + batch.num_accepted[row] - 1]))
        if batch.is_decode[row]:
            for token in range(query_len):
                writes.setdefault(token, []).append((i, blocks[column + token]))
        else:
            writes.setdefault(query_len - 1, []).append((i, blocks[column]))
    for boundary in batch.boundaries:
        writes.setdefault(boundary.num_tokens - 1, []).append((place[boundary.row], boundary.block_id))

    read_row, read_block = torch.tensor(reads, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    query_lens = [batch.query_lens[row] for row in order]
    live_rows = [sum(query_len > t for query_len in query_lens) for t in range(query_lens[0])]
    first_token = [starts[row] for row in order]
    return ScanPlan(num_tokens, query_lens, live_rows, first_token, bool(reads), read_row, read_block, writes)


def mamba2_scan(
    x: torch.Tensor,
    dt_raw: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_min: float,
    temporal_state: torch.Tensor,
    plan: ScanPlan,
) -> torch.Tensor:
    """Run the recurrence over every row; update `temporal_state` in place.

    x [T, heads, head_dim]; dt_raw [T, heads]; B, C [T, groups, d_state], head h using group h // (heads / groups);
    A (negative), D, dt_bias [heads], fp32; temporal_state [blocks, heads, head_dim, d_state], fp32 or 16 bit.
    Returns y [T, heads, head_dim] in fp32. Only the blocks of the plan are read or written.
    """
    num_tokens, num_heads, head_dim = x.shape
    num_groups, d_state = B.shape[1:]
    rows_per_group = num_heads // num_groups * head_dim
    x = x.float()
    dt = softplus(dt_raw.float() + dt_bias).clamp_(min=dt_min)
    decay = torch.exp(dt * A)
    dtx = (x * dt[..., None]).view(num_tokens, num_groups, rows_per_group, 1)
    B = B.float().unsqueeze(2)
    C = C.float()
    y = torch.empty(num_tokens, num_groups, rows_per_group, dtype=torch.float32, device=x.device)

    num_rows = len(plan.query_lens)
    state = torch.zeros(num_rows, num_heads, head_dim, d_state, dtype=torch.float32, device=x.device)
    if plan.has_state:
        state[plan.read_row] = temporal_state[plan.read_block].float()

    bytes_per_token = 4 * state.numel()
    segment_tokens = max(1, min(SEGMENT_TOKENS, SEGMENT_BYTES // bytes_per_token))
    first_token = torch.tensor(plan.first_token, device=x.device)
    last_token = torch.tensor(
        [f + q - 1 for f, q in zip(plan.first_token, plan.query_lens, strict=True)], device=x.device
    )

    for t0 in range(0, plan.query_lens[0], segment_tokens):
        t1 = min(t0 + segment_tokens, plan.query_lens[0])
        active = plan.live_rows[t0]
        tokens = first_token[:active] + torch.arange(t0, t1, device=x.device)[:, None]  # [t1 - t0, active]
        index = tokens.minimum(last_token[:active]).flatten()  # a row that ends inside repeats its last token
        states = torch.mul(dtx[index], B[index]).view(t1 - t0, active, num_heads, head_dim, d_state)
        decays = decay[index].view(t1 - t0, active, num_heads, 1, 1)
        for t in range(t0, t1):
            live = plan.live_rows[t]
            states[t - t0, :live].addcmul_(state[:live], decays[t - t0, :live])
            state = states[t - t0]
            if temporal_state.dtype != torch.float32:
                state.copy_(state.to(temporal_state.dtype))
            for row, block in plan.writes.get(t, ()):
                temporal_state[block] = state[row]
        segment_y = torch.bmm(C[index].view(-1, 1, d_state), states.view(-1, rows_per_group, d_state).transpose(1, 2))
        segment_y = segment_y.view(-1, num_groups, rows_per_group)
        if plan.live_rows[t1 - 1] < active:
            inside = (tokens <= last_token[:active]).flatten()
            index, segment_y = index[inside], segment_y[inside]
        y[index] = segment_y
    return y.view(num_tokens, num_heads, head_dim) + x * D[:, None]
