"""Between a step's rows and the slots that their requests keep (runner V2): numbers out before it, results in after.

Slots are int32 [R], each row its own. Integers only; on a GPU each function is one launch.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.launch import runs_kernel

BLOCK = 128


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows"],
    do_not_specialize_on_alignment=["p_slot", "p_row", "p_offset", "p_token", "p_numbers", "p_token_out"],
)
def gather_slots_kernel(
    p_slot, p_row, p_offset, p_token, p_computed, p_column, p_accepted, p_next_token, p_drafts,
    p_numbers, p_token_out, num_tokens, num_rows,
    NUM_DRAFTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """numbers[:, r] = computed, column, accepted of slot[r]; a token < 0 becomes its slot's next token or a draft.

    Grid: blocks of BLOCK tokens and rows. Writes numbers int32, tokens int64.
    """
    wait_for_inputs(PDL)
    o_i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_i < num_rows
    b_slot = tl.load(p_slot + o_i, mask=mask, other=0)
    p_numbers += o_i
    tl.store(p_numbers, tl.load(p_computed + b_slot, mask=mask, other=0), mask=mask)
    tl.store(p_numbers + num_rows, tl.load(p_column + b_slot, mask=mask, other=0), mask=mask)
    tl.store(p_numbers + 2 * num_rows, tl.load(p_accepted + b_slot, mask=mask, other=0), mask=mask)

    mask = o_i < num_tokens
    b_token = tl.load(p_token + o_i, mask=mask, other=0)
    is_unknown = mask & (b_token < 0)
    b_slot = tl.load(p_slot + tl.load(p_row + o_i, mask=is_unknown, other=0), mask=is_unknown, other=0).to(tl.int64)
    b_draft = tl.minimum(tl.load(p_offset + o_i, mask=is_unknown, other=0), NUM_DRAFTS) - 1
    b_next = tl.load(p_next_token + b_slot, mask=is_unknown & (b_draft < 0), other=0)
    b_known = tl.load(p_drafts + b_slot * NUM_DRAFTS + b_draft, mask=is_unknown & (b_draft >= 0), other=0)
    b_unknown = tl.where(b_draft < 0, b_next, b_known)
    tl.store(p_token_out + o_i, tl.where(is_unknown, b_unknown, b_token), mask=mask)


@triton.jit(
    do_not_specialize=["num_rows", "block_tokens"],
    do_not_specialize_on_alignment=["p_slot", "p_row_computed", "p_counts", "p_token", "p_draft", "p_results"],
)
def advance_slots_kernel(
    p_slot, p_row_computed, p_counts, p_token, p_draft, p_computed, p_next_token, p_drafts, p_num_crossed,
    p_results, num_rows, block_tokens, NUM_DRAFTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """computed[slot] = n + final, next_token[slot] = the last token kept, drafts[slot] = drafts; results[r]: all of it.

    Grid: rows; a program owns one and its slot. Integers; decode rows that cross a boundary add 1 to num_crossed.
    """
    wait_for_inputs(PDL)
    i_row, o_place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot = tl.load(p_slot + i_row).to(tl.int64)
    p_counts += i_row
    kept, num_verified = tl.load(p_counts), tl.load(p_counts + num_rows)
    before = tl.load(p_row_computed + i_row)
    after = before + tl.load(p_counts + 2 * num_rows)
    is_draft = o_place < NUM_DRAFTS
    b_token = tl.load(p_token + i_row * (NUM_DRAFTS + 1) + o_place, mask=o_place <= NUM_DRAFTS, other=0)
    b_draft = tl.load(p_draft + i_row * NUM_DRAFTS + o_place, mask=is_draft, other=0)
    tl.store(p_computed + slot, after)
    tl.store(p_next_token + slot, tl.sum(tl.where(o_place == kept - 1, b_token, 0), axis=0), mask=kept > 0)
    tl.store(p_drafts + slot * NUM_DRAFTS + o_place, b_draft, mask=is_draft)
    if (tl.load(p_counts + 3 * num_rows) > 0) & (after // block_tokens > before // block_tokens):
        tl.atomic_add(p_num_crossed, 1, sem="relaxed")
    p_results += i_row * (2 * NUM_DRAFTS + 3)
    tl.store(p_results, kept.to(tl.int64))
    tl.store(p_results + 1, num_verified.to(tl.int64))
    tl.store(p_results + 2 + o_place, b_token, mask=o_place <= NUM_DRAFTS)
    tl.store(p_results + 3 + NUM_DRAFTS + o_place, b_draft, mask=is_draft)


def gather_slots_reference(
    slots: torch.Tensor,
    row: torch.Tensor,
    offset: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    running_column: torch.Tensor,
    num_accepted: torch.Tensor,
    next_token: torch.Tensor,
    drafts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row its slot's num_computed, running_column and num_accepted, int32 [3, R]; and the tokens, int64 [T].

    row, offset int64 [T]: of a token, its row and its place within it. token_ids int64 [T]: negative where the slot
    knows. By slot: the three numbers int32, next_token int64, drafts int64 [slots, S].
    """
    slots = slots.long()
    of_slot = torch.cat([next_token[slots, None], drafts[slots]], dim=1)
    known = of_slot[row, offset.clamp(max=drafts.shape[1])]
    numbers = torch.stack([num_computed[slots], running_column[slots], num_accepted[slots]])
    return numbers, torch.where(token_ids < 0, known, token_ids)


def advance_slots_reference(
    slots: torch.Tensor,
    row_computed: torch.Tensor,
    counts: torch.Tensor,
    token_ids: torch.Tensor,
    draft_ids: torch.Tensor,
    num_computed: torch.Tensor,
    next_token: torch.Tensor,
    drafts: torch.Tensor,
    num_crossed: torch.Tensor,
    block_tokens: int,
) -> torch.Tensor:
    """Advance every row's slot by what the step made final. Returns what the host wants to know, int64 [R, 2S+3].

    By row: row_computed int32, its count before the step; counts int32 [4, R], token_ids int64 [R, S+1] as
    `verify_drafts` gives them; draft_ids int64 [R, S], for the next step. By slot, written: num_computed, next_token
    (of rows that keep one), drafts. num_crossed int64 []: grows by the decode rows that crossed a boundary.
    Returns tokens kept, drafts looked at, token_ids, draft_ids side by side.
    """
    slots, (kept, num_verified, final, of_decode) = slots.long(), counts
    after = row_computed + final
    num_computed[slots] = after
    last = token_ids.gather(1, (kept - 1).clamp(min=0).long()[:, None])[:, 0]
    next_token[slots] = torch.where(kept > 0, last, next_token[slots])
    drafts[slots] = draft_ids
    num_crossed += ((of_decode > 0) & (after // block_tokens > row_computed // block_tokens)).sum()
    return torch.cat([kept[:, None], num_verified[:, None], token_ids, draft_ids], dim=1)


def gather_slots(*arguments: torch.Tensor):
    """`gather_slots_reference`."""
    return (gather_slots_on_gpu if runs_kernel(arguments[0]) else gather_slots_reference)(*arguments)


def advance_slots(*arguments):
    """`advance_slots_reference`."""
    return (advance_slots_on_gpu if runs_kernel(arguments[0]) else advance_slots_reference)(*arguments)


def gather_slots_on_gpu(slots, row, offset, token_ids, num_computed, running_column, num_accepted, next_token, drafts):
    """`gather_slots_reference` by its kernel."""
    num_tokens, num_rows = len(token_ids), len(slots)
    by_slot = (num_computed, running_column, num_accepted, next_token, drafts)
    assert all(each.is_contiguous() for each in (slots, row, offset, token_ids, *by_slot))
    numbers = torch.empty(3, num_rows, dtype=torch.int32, device=slots.device)
    tokens = torch.empty_like(token_ids)
    gather_slots_kernel[(triton.cdiv(max(num_tokens, num_rows), BLOCK),)](
        slots, row, offset, token_ids, *by_slot, numbers, tokens, num_tokens, num_rows, drafts.shape[1], BLOCK,
        **pdl(slots.device),
    )  # fmt: skip
    return numbers, tokens


def advance_slots_on_gpu(
    slots, row_computed, counts, token_ids, draft_ids, num_computed, next_token, drafts, num_crossed, block_tokens
):
    """`advance_slots_reference` by its kernel."""
    num_rows, num_drafts = draft_ids.shape
    tensors = (slots, row_computed, counts, token_ids, draft_ids, num_computed, next_token, drafts, num_crossed)
    assert all(each.is_contiguous() for each in tensors)
    results = torch.empty(num_rows, 2 * num_drafts + 3, dtype=torch.int64, device=slots.device)
    advance_slots_kernel[(num_rows,)](
        *tensors, results, num_rows, block_tokens, num_drafts, triton.next_power_of_2(num_drafts + 1),
        num_warps=1, **pdl(slots.device),
    )  # fmt: skip
    return results
