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


@dataclass(frozen=True)
class ConvPlan:
    """Index lists over the extended buffer, int64, shared by all layers of one forward pass."""

    num_extended: int  # sum over rows of W-1 + query_len
    input_index: torch.Tensor  # [T] where each token's input goes, rows in batch order
    fresh_index: torch.Tensor  # [.] windows of rows without state: zeros
    read_index: torch.Tensor  # [.] windows of rows with state
    read_block: torch.Tensor
    read_slot: torch.Tensor
    write_index: torch.Tensor  # [.] inputs to keep in a state
    write_block: torch.Tensor
    write_slot: torch.Tensor


def plan_causal_conv1d(batch, conv_width: int, device: torch.device | str = "cpu") -> ConvPlan:
    """Lay out what every row of a `MambaBatch` reads from its conv state and leaves in one.

    Decode row: window in slots a-1 .. a+W-3 of the running column (a = num_accepted); afterwards slot i holds the
    input of position n-(W-2)+i, so the a oldest are gone and the new inputs follow. Prefill row: window in slots
    0 .. W-2; afterwards the last W-1 inputs. A boundary after m of the row's tokens gets the W-1 inputs before it.
    """
    window = conv_width - 1
    starts, num_extended = [], 0
    for query_len in batch.query_lens:
        starts.append(num_extended)
        num_extended += window + query_len

    inputs, fresh, reads, writes = [], [], [], []
    for row, query_len in enumerate(batch.query_lens):
        start, blocks = starts[row], batch.block_table[row]
        block = blocks[batch.running_column[row]]
        inputs.append(torch.arange(start + window, start + window + query_len))
        if batch.has_state[row]:
            first_slot = batch.num_accepted[row] - 1
            reads += [(start + i, block, first_slot + i) for i in range(window)]
        else:
            fresh += range(start, start + window)
        if batch.is_decode[row]:
            writes += [(start + 1 + i, block, i) for i in range(window - 1 + query_len)]
        else:
            writes += [(start + query_len + i, block, i) for i in range(window)]
    for boundary in batch.boundaries:
        first = starts[boundary.row] + boundary.num_tokens
        writes += [(first + i, boundary.block_id, i) for i in range(window)]

    read = torch.tensor(reads, dtype=torch.int64, device=device).view(-1, 3).unbind(1)
    write = torch.tensor(writes, dtype=torch.int64, device=device).view(-1, 3).unbind(1)
    fresh_index = torch.tensor(fresh, dtype=torch.int64, device=device)
    return ConvPlan(num_extended, torch.cat(inputs).to(device), fresh_index, *read, *write)


def causal_conv1d(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: ConvPlan,
    conv_layout: str,
) -> torch.Tensor:
    """Convolve x and apply silu; update `conv_state` in place.

    x [T, dim]; conv_state [blocks, state_len, dim] (SD) or [blocks, dim, state_len] (DS), in the dtype of x;
    weight [W, dim] and bias [dim] in fp32. Returns [T, dim] in the dtype of x. All reads come before all writes.
    """
    slots = conv_state if conv_layout == "SD" else conv_state.transpose(1, 2)
    extended = x.new_empty(plan.num_extended, x.shape[1])
    extended[plan.input_index] = x
    extended[plan.fresh_index] = 0
    extended[plan.read_index] = slots[plan.read_block, plan.read_slot]
    slots[plan.write_block, plan.write_slot] = extended[plan.write_index]

    taps = weight.shape[0]
    num_outputs = plan.num_extended - (taps - 1)  # those that straddle two rows are dropped below
    extended = extended.float()
    out = extended[:num_outputs] * weight[0]
    for tap in range(1, taps):
        out.addcmul_(extended[tap : tap + num_outputs], weight[tap])
    if bias is not None:
        out += bias
    return silu(out[plan.input_index - (taps - 1)]).to(x.dtype)
