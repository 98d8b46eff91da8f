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
from mambalign.kernels.rows import MambaRows

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


def causal_conv1d_varlen_reference(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: MambaRows,
    layout: str,
) -> torch.Tensor:
    """Convolve x and apply silu; leave every row's inputs in `conv_state`, in place.

    x [T, dim], whose tokens may lie further apart than dim; conv_state [blocks, state_len, dim] ("SD") or
    [blocks, dim, state_len] ("DS"), in the dtype of x; weight [W, dim] and bias [dim] in fp32. Returns [T, dim] in the
    dtype of x; undefined for tokens of no row. Number the inputs of a row from 0, its window being -(W-1) .. -1: slots
    conv_offset .. conv_offset+W-2 of conv_block, or zeros without a temporal_block. A decode row leaves inputs
    -(W-2) .. q-1 in conv_block, from slot 0; a prefill row the last W-1, and in the state_block of a token the W-1 that
    end with it.
    """
    window = weight.shape[0] - 1
    slots = conv_state if layout == "SD" else conv_state.transpose(1, 2)
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    kept_blocks = rows.state_block.tolist()
    for row, (start, num_inputs) in enumerate(zip(rows.query_start.tolist(), rows.query_len.tolist(), strict=True)):
        if num_inputs == 0:
            continue
        block, offset = int(rows.conv_block[row]), int(rows.conv_offset[row])
        has_window = int(rows.temporal_block[row]) >= 0
        old = slots[block, offset : offset + window] if has_window else x.new_zeros(window, x.shape[1])
        inputs = torch.cat([old, x[start : start + num_inputs]])  # input i is inputs[window + i]
        sums = torch.zeros(num_inputs, x.shape[1], device=x.device) if bias is None else bias
        for tap in range(window + 1):
            sums = sums + weight[tap] * inputs[tap : tap + num_inputs].float()
        y[start : start + num_inputs] = silu(sums)
        if int(rows.is_decode[row]):
            slots[block, : window - 1 + num_inputs] = inputs[1:]
            continue
        for i, kept in enumerate(kept_blocks[start : start + num_inputs]):
            if kept >= 0 and kept != block:
                slots[kept, :window] = inputs[i + 1 : i + 1 + window]
        slots[block, :window] = inputs[num_inputs:]
    return y


def causal_conv1d_varlen(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: MambaRows,
    layout: str,
) -> torch.Tensor:
    """`causal_conv1d_varlen_reference`, fast: no host value but those of `rows` is looked at."""
    assert conv_state.is_contiguous() and x.stride(1) == 1 and conv_state.dtype == x.dtype
    if x.dtype == torch.float32:
        from mambalign.kernels.cpu import conv_scan  # compiles: not where a GPU serves

        return conv_scan.causal_conv1d(x, conv_state, weight, bias, rows, layout)
    return causal_conv1d_varlen_reference(x, conv_state, weight, bias, rows, layout)
