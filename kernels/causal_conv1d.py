"""Causal depthwise convolution over a paged conv state: the torch reference.

Formula: y_p = silu(bias + sum_k weight[k] * x_{p - (W-1) + k}), one channel at a time, taps added in order in fp32.

A row's conv state holds the W-1 inputs before its next token. Decode rows keep more: the state block of their
running column also has the inputs of the drafts, and their window starts at slot `num_accepted - 1`, so that
rejected drafts are simply not looked at. What each row reads and leaves is written down once a forward pass, as
index lists over an "extended" buffer in which a row's old window stands before its new inputs:

    extended row r:  [ W-1 inputs before the row | query_len inputs ]

Every layer then does the same: gather windows, append inputs, convolve, scatter slots.
"""

from dataclasses import dataclass

import torch

from mambalign.kernels.activation import silu

PIECE = 256  # rows convolved at a time, so that they stay in the processor's cache


@dataclass(frozen=True)
class ConvPlan:
    """What each row reads and leaves, and index lists (int64) over the extended buffer; for all layers of one pass."""

    query_lens: list[int]  # [R]
    has_state: list[bool]  # [R]
    read_block: torch.Tensor  # [rows with state * (W-1)]
    read_slot: torch.Tensor
    write_index: torch.Tensor  # [.] inputs to keep in a state
    write_block: torch.Tensor
    write_slot: torch.Tensor
    output_index: torch.Tensor | None  # [T] where each token's output is; None for a single row


def plan_causal_conv1d(batch, conv_width: int, device: torch.device | str = "cpu") -> ConvPlan:
    """Lay out what every row of a `MambaBatch` reads from its conv state and leaves in one.

    Decode row: window in slots a-1 .. a+W-3 of the running column (a = num_accepted); afterwards slot i holds the
    input of position n-(W-2)+i, so the a oldest are gone and the new inputs follow. Prefill row: window in slots
    0 .. W-2; afterwards the last W-1 inputs. A boundary after m of the row's tokens gets the W-1 inputs before it.
    """
    window = conv_width - 1
    starts, start = [], 0
    reads, writes, outputs = [], [], []
    for row, query_len in enumerate(batch.query_lens):
        block = batch.block_table[row][batch.running_column[row]]
        starts.append(start)
        outputs.append(torch.arange(start, start + query_len))
        if batch.has_state[row]:
            first_slot = batch.num_accepted[row] - 1
            reads += [(block, first_slot + i) for i in range(window)]
        if batch.is_decode[row]:
            writes += [(start + 1 + i, block, i) for i in range(window - 1 + query_len)]
        else:
            writes += [(start + query_len + i, block, i) for i in range(window)]
        start += window + query_len
    for boundary in batch.boundaries:
        first = starts[boundary.row] + boundary.num_tokens
        writes += [(first + i, boundary.block_id, i) for i in range(window)]

    read = torch.tensor(reads, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    write = torch.tensor(writes, dtype=torch.int64, device=device).view(-1, 3).unbind(1)
    output_index = torch.cat(outputs).to(device) if len(outputs) > 1 else None
    return ConvPlan(batch.query_lens, batch.has_state, *read, *write, output_index)


def causal_conv1d(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    plan: ConvPlan,
    conv_layout: str,
) -> torch.Tensor:
    """Convolve x and apply silu; update `conv_state` in place.

    x [T, dim]; conv_state [blocks, state_len, dim] (SD) or [blocks, dim, state_len] (DS), in the dtype of x;
    weight [W, dim] and bias [dim] in fp32. Returns [T, dim] in the dtype of x. All reads come before all writes.
    """
    taps = weight.shape[0]
    slots = conv_state if conv_layout == "SD" else conv_state.transpose(1, 2)
    extended = _extend(x, slots, taps - 1, plan)
    slots[plan.write_block, plan.write_slot] = extended.index_select(0, plan.write_index)

    num_outputs = extended.shape[0] - (taps - 1)  # those that straddle two rows are dropped below
    out = x.new_empty(num_outputs, x.shape[1])
    for start in range(0, num_outputs, PIECE):
        stop = min(start + PIECE, num_outputs)
        inputs = extended[start : stop + taps - 1].float()
        sums = torch.addcmul(bias, inputs[: stop - start], weight[0])
        for tap in range(1, taps):
            sums.addcmul_(inputs[tap : tap + stop - start], weight[tap])
        out[start:stop] = silu(sums)
    return out if plan.output_index is None else out.index_select(0, plan.output_index)


def _extend(x: torch.Tensor, slots: torch.Tensor, window: int, plan: ConvPlan) -> torch.Tensor:
    """[sum over rows of window + query_len, dim]: each row's old window, then its inputs."""
    windows = iter(slots[plan.read_block, plan.read_slot].split(window))
    zeros = x.new_zeros(window, x.shape[1])
    pieces = []
    for has_state, inputs in zip(plan.has_state, x.split(plan.query_lens), strict=True):
        pieces += [next(windows) if has_state else zeros, inputs]
    return torch.cat(pieces)
