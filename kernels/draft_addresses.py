"""Where the drafter's passes run: each row's next slot, and the one after it for each further draft, in one launch.

Pass i drafts from the token at n + f + i, for a row of n computed tokens, f of this step's final: pass 0 is the last of
those that the drafter fills together, the later ones run over the drafts so far. A row without final tokens is inert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.launch import runs_kernel
from mambalign.kernels.step_addresses import token_slots_reference

BLOCK = 128


class DraftAddresses(NamedTuple):
    """Of R rows, and of the D of them that draft."""

    first: torch.Tensor  # int32 [R], position of the first token that the drafter fills
    last: torch.Tensor  # int64 [D], the step's token that is final last
    query_len: torch.Tensor  # int32 [D], 1; 0 of an inert row
    context_len: torch.Tensor  # int32 [S, D], tokens before the one that each pass drafts from
    positions: torch.Tensor  # int64 [S, D], of that token
    slots: torch.Tensor  # int64 [S, D], where its key goes; -1: nowhere


@triton.jit(
    do_not_specialize=["num_rows", "num_drafting", "columns"],
    do_not_specialize_on_alignment=[
        "p_query_start", "p_computed", "p_final", "p_drafting", "p_table", "p_first", "p_last", "p_query_len",
        "p_context_len", "p_position", "p_slot",
    ],
)  # fmt: skip
def draft_addresses_kernel(
    p_query_start, p_computed, p_final, p_drafting, p_table,
    p_first, p_last, p_query_len, p_context_len, p_position, p_slot, num_rows, num_drafting, columns,
    PASSES: tl.constexpr, KV_BLOCK: tl.constexpr, IS_LIST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """first = n + 1; last = query_start + max(f - 1, 0); of pass i, position n + f + i and its slot in the table.

    Grid: blocks of BLOCK rows. IS_LIST: the rows that draft are those of p_drafting, else all. Reads int32, and
    drafting int64; writes int32, and last, positions and slots int64.
    """
    wait_for_inputs(PDL)
    o_r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_r < num_rows
    tl.store(p_first + o_r, tl.load(p_computed + o_r, mask=mask, other=0) + 1, mask=mask)
    mask = o_r < num_drafting
    b_row = o_r.to(tl.int64)
    if IS_LIST:
        b_row = tl.load(p_drafting + o_r, mask=mask, other=0)
    b_final = tl.load(p_final + b_row, mask=mask, other=0)
    b_position = tl.load(p_computed + b_row, mask=mask, other=0) + b_final
    b_last = tl.load(p_query_start + b_row, mask=mask, other=0) + tl.maximum(b_final - 1, 0)
    tl.store(p_last + o_r, b_last.to(tl.int64), mask=mask)
    tl.store(p_query_len + o_r, tl.minimum(b_final, 1), mask=mask)
    for i in tl.static_range(PASSES):
        b_column = tl.minimum(b_position // KV_BLOCK, columns - 1)
        b_block = tl.load(p_table + b_row * columns + b_column, mask=mask & (b_final > 0), other=0).to(tl.int64)
        b_slot = tl.where(b_final > 0, b_block * KV_BLOCK + b_position % KV_BLOCK, -1)
        tl.store(p_context_len + i * num_drafting + o_r, b_position, mask=mask)
        tl.store(p_position + i * num_drafting + o_r, b_position.to(tl.int64), mask=mask)
        tl.store(p_slot + i * num_drafting + o_r, b_slot, mask=mask)
        b_position += 1


def draft_addresses_reference(
    query_start: torch.Tensor,
    num_computed: torch.Tensor,
    num_final: torch.Tensor,
    drafting: torch.Tensor | None,
    kv_table: torch.Tensor,
    num_passes: int,
    kv_block_tokens: int,
) -> DraftAddresses:
    """Addresses of `num_passes` passes, at least one.

    query_start, num_computed (n) and num_final (f) int32 [R]; kv_table int32 [R, columns]; drafting int64 [D], the rows
    that draft, or None: all.
    """
    row = torch.arange(len(num_final), device=num_final.device) if drafting is None else drafting
    final, passes = num_final[row], torch.arange(num_passes, device=row.device)[:, None]
    query_len = final.clamp(max=1)
    start = num_computed + num_final
    positions, slots = token_slots_reference(
        row.repeat(num_passes),
        passes.expand(-1, len(row)).reshape(-1),
        start,
        num_final.clamp(max=1) * num_passes,
        kv_table,
        kv_block_tokens,
    )
    last = query_start[row].long() + (final - 1).clamp(min=0)
    context_len = (start[row] + passes).int()
    return DraftAddresses(
        num_computed + 1, last, query_len, context_len, positions.view(num_passes, -1), slots.view(num_passes, -1)
    )


def draft_addresses(*arguments) -> DraftAddresses:
    """`draft_addresses_reference`."""
    return (draft_addresses_on_gpu if runs_kernel(arguments[0]) else draft_addresses_reference)(*arguments)


def draft_addresses_on_gpu(
    query_start, num_computed, num_final, drafting, kv_table, num_passes, kv_block_tokens
) -> DraftAddresses:
    """`draft_addresses_reference` by its kernel."""
    num_rows, columns = kv_table.shape
    num_drafting = num_rows if drafting is None else len(drafting)
    numbers = (query_start, num_computed, num_final, kv_table)
    assert all(each.is_contiguous() and each.dtype == torch.int32 for each in numbers)
    int32, int64 = (dict(dtype=dtype, device=kv_table.device) for dtype in (torch.int32, torch.int64))
    addresses = DraftAddresses(
        torch.empty(num_rows, **int32),
        torch.empty(num_drafting, **int64),
        torch.empty(num_drafting, **int32),
        torch.empty(num_passes, num_drafting, **int32),
        *torch.empty(2, num_passes, num_drafting, **int64),
    )
    draft_addresses_kernel[(triton.cdiv(num_rows, BLOCK),)](
        query_start, num_computed, num_final, drafting, kv_table, *addresses, num_rows, num_drafting, columns,
        num_passes, kv_block_tokens, drafting is not None, BLOCK, **pdl(kv_table.device),
    )  # fmt: skip
    return addresses
