"""Verification of drafts on the device: what the target takes at each place, and how much of it a row keeps.

Integers only; on a GPU one launch, without synchronisation.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.launch import runs_kernel

MISSING = -1  # a draft that is not there, or a place that is not sampled: equal to no token


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "p_sampled", "p_token", "p_query_start", "p_query_len", "p_is_decode", "p_sample_start", "p_num_samples",
        "p_wanted", "p_target", "p_counts",
    ],
)  # fmt: skip
def verify_drafts_kernel(
    p_sampled, p_token, p_query_start, p_query_len, p_is_decode, p_sample_start, p_num_samples, p_wanted,
    p_target, p_counts, num_rows,
    NUM_DRAFTS: tl.constexpr, HAS_WANTED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """target[r, j] = sampled[sample_start + j]; kept = 1 + the drafts before the first that differs from its target.

    Grid: rows; a program owns one, and looks at its place j and the draft that place j runs together.
    Reads sampled tokens, the step's tokens and the row's numbers; writes targets, int64, and the four counts, int32.
    """
    wait_for_inputs(PDL)
    i_row, o_place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    num_samples = tl.load(p_num_samples + i_row)
    query_len, is_decode = tl.load(p_query_len + i_row), tl.load(p_is_decode + i_row) != 0
    p_sampled += tl.load(p_sample_start + i_row) + o_place
    is_sampled = o_place < num_samples
    is_draft = is_sampled & (o_place > 0)
    b_target = tl.load(p_sampled, mask=is_sampled, other=-1)
    b_before = tl.load(p_sampled - 1, mask=is_draft, other=-1)
    b_draft = tl.load(p_token + tl.load(p_query_start + i_row) + o_place, mask=is_draft, other=-1)
    differs = (o_place > 0) & ((b_draft != b_before) | (b_draft < 0))
    kept = tl.min(tl.where(differs, o_place, NUM_DRAFTS + 1), axis=0)
    if HAS_WANTED:
        kept = tl.load(p_wanted + i_row)
    kept = tl.minimum(kept, num_samples)
    tl.store(p_target + i_row * (NUM_DRAFTS + 1) + o_place, b_target, mask=o_place <= NUM_DRAFTS)
    p_counts += i_row
    tl.store(p_counts, kept)
    tl.store(p_counts + num_rows, tl.sum((is_draft & (b_draft >= 0)).to(tl.int32), axis=0))
    tl.store(p_counts + 2 * num_rows, tl.where(is_decode, kept, query_len))
    tl.store(p_counts + 3 * num_rows, tl.where(is_decode, kept, 0))


def verify_drafts_reference(
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    is_decode: torch.Tensor,
    sample_start: torch.Tensor,
    num_samples: torch.Tensor,
    num_drafts: int,
    wanted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets int64 [R, S+1], MISSING where a row does not sample, and counts int32 [4, R].

    Counts: tokens kept (the target's own, one for each draft that it confirms, and one more), drafts looked at, tokens
    final (of a prompt, all that ran), and tokens kept by decode rows (of a prompt, 0).
    sampled int64 [N], the target's own tokens; token_ids int64 [T], what ran: the draft of place j >= 1 is a row's
    query j. Others int32 [R]; a row samples at most as often as it has queries. wanted: tokens to keep whatever they
    are, at most what is sampled.
    """
    places = torch.arange(num_drafts + 1, device=sampled.device)
    is_sampled = places < num_samples[:, None]
    at_sample = torch.where(is_sampled, sample_start[:, None] + places, len(sampled))
    at_token = torch.where(is_sampled, query_start[:, None] + places, len(token_ids))[:, 1:]
    targets, drafts = (
        F.pad(ids, (0, 1), value=MISSING)[at] for ids, at in ((sampled, at_sample), (token_ids, at_token))
    )
    is_there = drafts >= 0
    if wanted is None:
        wanted = 1 + ((drafts == targets[:, :-1]) & is_there).cumprod(1).sum(1)
    kept = torch.minimum(wanted, num_samples)
    is_decode = is_decode != 0
    final, of_decode = torch.where(is_decode, kept, query_len), kept * is_decode
    return targets, torch.stack([kept, is_there.sum(1), final, of_decode]).int()


def verify_drafts(
    sampled, token_ids, query_start, query_len, is_decode, sample_start, num_samples, num_drafts, wanted=None
):
    """`verify_drafts_reference`."""
    run = verify_drafts_on_gpu if runs_kernel(sampled) else verify_drafts_reference
    rows = (query_start, query_len, is_decode, sample_start, num_samples)
    return run(sampled, token_ids, *rows, num_drafts, wanted)


def verify_drafts_on_gpu(
    sampled, token_ids, query_start, query_len, is_decode, sample_start, num_samples, num_drafts, wanted=None
):
    """`verify_drafts_reference` by its kernel."""
    num_rows, ids = len(num_samples), dict(dtype=torch.int64, device=sampled.device)
    of_rows = (query_start, query_len, is_decode, sample_start, num_samples, *([] if wanted is None else [wanted]))
    assert all(each.is_contiguous() and each.dtype == torch.int32 for each in of_rows)
    assert sampled.is_contiguous() and token_ids.is_contiguous()
    targets = torch.empty(num_rows, num_drafts + 1, **ids)
    counts = torch.empty(4, num_rows, dtype=torch.int32, device=sampled.device)
    verify_drafts_kernel[(num_rows,)](
        sampled, token_ids, *of_rows[:5], wanted, targets, counts, num_rows,
        num_drafts, wanted is not None, triton.next_power_of_2(num_drafts + 1), num_warps=1, **pdl(sampled.device),
    )  # fmt: skip
    return targets, counts
