"""The Mamba-2 recurrence over paged temporal states: the torch reference.

Formula (arXiv 2405.21060, section 2; names as in the published checkpoints), per head, in fp32:

    dt_t = max(softplus(dt_raw_t + dt_bias), dt_min)
    h_t  = exp(dt_t * A) * h_{t-1} + (dt_t * x_t) outer B_t        h [head_dim, d_state]
    y_t  = h_t C_t + D * x_t

One loop over the tokens of a row serves prefill, decode, the verification of drafts and the states at boundaries, so
a row's bits do not depend on how its tokens were cut into steps. Rows run side by side, longest first, so that those
that have a token t are a prefix; at most `ROWS_TOGETHER` of them, so that their states stay in the processor's cache.
Elementwise products, a fused multiply-add and a vector-matrix product are the whole step: each was found to give an
element the same bits wherever it lies in a tensor and whatever lies beside it (the tests pin that).

A 16-bit state is rounded to its dtype after every token, in the loop as in memory, so that a cut changes nothing.
"""

from dataclasses import dataclass

import torch

from mambalign.kernels.activation import softplus
from mambalign.kernels.rows import MambaRows

ROWS_TOGETHER = 8


@dataclass(frozen=True)
class ScanBlock:
    """Rows that run side by side, longest first: which states they read, and where they leave theirs."""

    live_rows: list[int]  # [longest row], how many rows have a token t
    read_row: torch.Tensor  # [.] rows that start from a state, int64
    read_block: torch.Tensor
    writes: dict[int, tuple[list[int], list[int]]]  # after token t: rows, and the blocks to leave their states in


@dataclass(frozen=True)
class ScanPlan:
    """The order in which a batch's tokens are run: block after block, in a block token t of every row, then t + 1."""

    blocks: list[ScanBlock]
    order: torch.Tensor | None  # [T] int64, the batch's token at each place of the loop; None for the batch's own order
    place: torch.Tensor | None  # its inverse


def plan_mamba2_scan(batch, device: torch.device | str = "cpu") -> ScanPlan:
    """Order the rows of a `MambaBatch` and look up their blocks.

    Decode row: token 0 continues from column running + num_accepted - 1, token j leaves its state in running + j.
    Prefill row: reads and leaves the running column, and leaves a copy at each boundary.
    """
    starts, num_tokens = [], 0
    for query_len in batch.query_lens:
        starts.append(num_tokens)
        num_tokens += query_len
    boundaries: dict[int, list] = {}
    for boundary in batch.boundaries:
        boundaries.setdefault(boundary.row, []).append(boundary)

    by_length = sorted(range(len(starts)), key=lambda row: -batch.query_lens[row])
    blocks, order = [], []
    for first in range(0, len(by_length), ROWS_TOGETHER):
        rows = by_length[first : first + ROWS_TOGETHER]
        reads: list[tuple[int, int]] = []
        writes: dict[int, list[tuple[int, int]]] = {}
        for i, row in enumerate(rows):
            columns, running, query_len = batch.block_table[row], batch.running_column[row], batch.query_lens[row]
            if batch.has_state[row]:
                reads.append((i, columns[running + batch.num_accepted[row] - 1]))
            for token in range(query_len) if batch.is_decode[row] else ():
                writes.setdefault(token, []).append((i, columns[running + token]))
            if not batch.is_decode[row]:
                writes.setdefault(query_len - 1, []).append((i, columns[running]))
            for boundary in boundaries.get(row, ()):
                writes.setdefault(boundary.num_tokens - 1, []).append((i, boundary.block_id))
        live_rows = [sum(batch.query_lens[row] > t for row in rows) for t in range(batch.query_lens[rows[0]])]
        order += [starts[row] + t for t, live in enumerate(live_rows) for row in rows[:live]]
        read_row, read_block = torch.tensor(reads, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        by_token = {t: ([i for i, _ in pairs], [block_id for _, block_id in pairs]) for t, pairs in writes.items()}
        blocks.append(ScanBlock(live_rows, read_row, read_block, by_token))
    if order == list(range(num_tokens)):
        return ScanPlan(blocks, None, None)
    order = torch.tensor(order, device=device)
    return ScanPlan(blocks, order, torch.empty_like(order).scatter_(0, order, torch.arange(num_tokens, device=device)))


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
    if plan.order is not None:
        x, dt_raw, B, C = (t.index_select(0, plan.order) for t in (x, dt_raw, B, C))
    num_tokens, num_heads, head_dim = x.shape
    num_groups, d_state = B.shape[1:]
    group_rows = num_heads // num_groups * head_dim  # rows of the state that share B and C
    x = x.float()
    dt = softplus(dt_raw + dt_bias).clamp_(min=dt_min)
    decay = torch.exp(dt * A).unsqueeze(-1)
    dtx = (x * dt.unsqueeze(-1)).view(num_tokens, num_groups, group_rows, 1)
    B = B.float().unsqueeze(2)
    C = C.float().reshape(num_tokens * num_groups, 1, d_state)
    y = torch.empty(num_tokens * num_groups, 1, group_rows, dtype=torch.float32, device=x.device)
    first = 0
    for block in plan.blocks:
        last = first + sum(block.live_rows)
        tokens, products = slice(first, last), slice(first * num_groups, last * num_groups)
        _scan_block(block, dtx[tokens], B[tokens], decay[tokens], C[products], y[products], temporal_state)
        first = last
    y = y.view(num_tokens, num_heads, head_dim).addcmul_(x, D.unsqueeze(-1))
    return y if plan.place is None else y.index_select(0, plan.place)


def _scan_block(block: ScanBlock, dtx, B, decay, C, y, temporal_state: torch.Tensor) -> None:
    """dtx [n, groups, group_rows, 1], B [n, groups, 1, d_state], decay [n, heads, 1], C and y [n * groups, 1, ..]."""
    num_groups, group_rows, d_state = dtx.shape[1], dtx.shape[2], B.shape[3]
    states = _initial_states(block, temporal_state)
    products = torch.empty_like(states)
    products_of_rows = [num_groups * live for live in block.live_rows]
    steps = zip(
        block.live_rows,
        dtx.split_with_sizes(block.live_rows),
        B.split_with_sizes(block.live_rows),
        decay.split_with_sizes(block.live_rows),
        C.split_with_sizes(products_of_rows),
        y.split_with_sizes(products_of_rows),
        strict=True,
    )
    live = 0
    for t, (live_now, dtx_t, B_t, decay_t, C_t, y_t) in enumerate(steps):
        if live_now != live:
            live = live_now
            state = states[:live].view(live, decay.shape[1], -1)
            product = products[:live].view_as(state)
            outer = product.view(live, num_groups, group_rows, d_state)
            columns = state.view(live * num_groups, group_rows, d_state).transpose(1, 2)
        torch.mul(dtx_t, B_t, out=outer)
        torch.addcmul(product, state, decay_t, out=state)
        if temporal_state.dtype != torch.float32:
            state.copy_(state.to(temporal_state.dtype))
        torch.bmm(C_t, columns, out=y_t)
        if t in block.writes:
            _keep(states, *block.writes[t], temporal_state)


def _initial_states(block: ScanBlock, temporal_state: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head_dim, d_state] in fp32, a copy; zeros for rows without a state."""
    given = temporal_state.index_select(0, block.read_block).float()
    if len(block.read_row) == block.live_rows[0]:
        return given
    states = given.new_zeros(block.live_rows[0], *temporal_state.shape[1:])
    return states.index_copy_(0, block.read_row, given)


def _keep(states: torch.Tensor, rows: list[int], block_ids: list[int], temporal_state: torch.Tensor) -> None:
    if len(rows) == 1:
        temporal_state[block_ids[0]].copy_(states[rows[0]])
        return
    kept = states[: len(rows)] if rows == list(range(len(rows))) else states[rows]
    temporal_state.index_copy_(0, torch.tensor(block_ids, device=kept.device), kept.to(temporal_state.dtype))


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
    num_heads, num_groups = x.shape[1], B.shape[1]
    y = torch.zeros(x.shape, device=x.device)
    starts, lengths, kept_blocks = rows.query_start.tolist(), rows.query_len.tolist(), rows.state_block.tolist()
    for start, length, block in zip(starts, lengths, rows.temporal_block.tolist(), strict=True):
        state = torch.zeros(temporal_state.shape[1:], device=x.device)
        if length > 0 and block >= 0:
            state = temporal_state[block].float()
        for token in range(start, start + length):
            b_x = x[token].float()
            b_B, b_C = (t[token].float().repeat_interleave(num_heads // num_groups, 0) for t in (B, C))
            dt = softplus(dt_raw[token] + dt_bias).clamp(min=dt_min)
            update = (dt[:, None] * b_x)[:, :, None] * b_B[:, None, :]
            state = state * torch.exp(dt * A)[:, None, None] + update
            state = state.to(temporal_state.dtype).float()
            y[token] = (state * b_C[:, None, :]).sum(-1) + D[:, None] * b_x
            if kept_blocks[token] >= 0:
                temporal_state[kept_blocks[token]] = state.to(temporal_state.dtype)
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
    assert temporal_state.is_contiguous()
    arguments = (x, dt_raw, B, C, A, D, dt_bias, dt_min, temporal_state, rows)
    if temporal_state.dtype == torch.float32:
        from mambalign.kernels.cpu import conv_scan  # compiles: not where a GPU serves

        return conv_scan.mamba2_scan(*arguments)
    return mamba2_scan_varlen_reference(*arguments)
