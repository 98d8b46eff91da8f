"""A step's rows copied into a padded step of W tokens a row, as many rows as it has; what is left over is inert.

Integers only; on a GPU each function is one launch. Rows past the given ones get the number 0, so that they run no
token; tokens and table columns that no row fills keep what they held, which nothing reads.
"""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs
from mambalign.kernels.launch import runs_kernel

BLOCK = 256


@triton.jit(
    do_not_specialize=["num_given", "state_columns", "kv_columns", "kv_columns_out", "num_rows"],
    do_not_specialize_on_alignment=[
        "p_query_start", "p_query_len", "p_computed", "p_column", "p_accepted", "p_token", "p_state_table",
        "p_kv_table", "p_numbers", "p_token_out", "p_place",
    ],
)  # fmt: skip
def pad_rows_kernel(
    p_query_start, p_query_len, p_computed, p_column, p_accepted, p_token, p_state_table, p_kv_table,
    p_numbers, p_token_out, p_place, p_state_table_out, p_kv_table_out,
    num_given, num_rows, state_columns, kv_columns, kv_columns_out,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """numbers[:, r] = query_len, computed, column, accepted; tokens and tables beside them; place[t] of the step's t.

    Grid: padded rows; a program owns one. Reads and writes int32, tokens and places int64.
    """
    wait_for_inputs(PDL)
    i_row, o_token, o_column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_W), tl.arange(0, BLOCK)
    is_given = i_row < num_given
    p_numbers += i_row
    query_len = tl.load(p_query_len + i_row, mask=is_given, other=0)
    tl.store(p_numbers, query_len)
    tl.store(p_numbers + num_rows, tl.load(p_computed + i_row, mask=is_given, other=0))
    tl.store(p_numbers + 2 * num_rows, tl.load(p_column + i_row, mask=is_given, other=0))
    tl.store(p_numbers + 3 * num_rows, tl.load(p_accepted + i_row, mask=is_given, other=0))
    if is_given:
        start, is_own = tl.load(p_query_start + i_row), o_token < query_len
        b_place = i_row * WIDTH + o_token
        tl.store(p_token_out + b_place, tl.load(p_token + start + o_token, mask=is_own), mask=is_own)
        tl.store(p_place + start + o_token, b_place, mask=is_own)
        for first in range(0, state_columns, BLOCK):
            o_c = first + o_column
            b_block = tl.load(p_state_table + i_row * state_columns + o_c, mask=o_c < state_columns)
            tl.store(p_state_table_out + i_row * state_columns + o_c, b_block, mask=o_c < state_columns)
        for first in range(0, kv_columns, BLOCK):
            o_c = first + o_column
            b_block = tl.load(p_kv_table + i_row * kv_columns + o_c, mask=o_c < kv_columns)
            tl.store(p_kv_table_out + i_row * kv_columns_out + o_c, b_block, mask=o_c < kv_columns)


@triton.jit(
    do_not_specialize=["num_given"],
    do_not_specialize_on_alignment=["p_query_start", "p_query_len", "p_sampled", "p_final"],
)
def pad_sampled_kernel(
    p_query_start, p_query_len, p_sampled, p_final, p_sampled_out, p_final_out, num_given,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """final_out[r] = final[r], or 0 past the given rows; sampled_out[r, j] = sampled[query_start + j].

    Grid: padded rows; a program owns one. Counts int32, tokens int64.
    """
    wait_for_inputs(PDL)
    i_row, o_token = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_W)
    is_given = i_row < num_given
    tl.store(p_final_out + i_row, tl.load(p_final + i_row, mask=is_given, other=0))
    is_own = o_token < tl.load(p_query_len + i_row, mask=is_given, other=0)
    start = tl.load(p_query_start + i_row, mask=is_given, other=0)
    b_token = tl.load(p_sampled + start + o_token, mask=is_own)
    tl.store(p_sampled_out + i_row * WIDTH + o_token, b_token, mask=is_own)


def pad_rows_reference(
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    num_computed: torch.Tensor,
    running_column: torch.Tensor,
    num_accepted: torch.Tensor,
    token_ids: torch.Tensor,
    state_table: torch.Tensor,
    kv_table: torch.Tensor,
    numbers_out: torch.Tensor,
    tokens_out: torch.Tensor,
    place_out: torch.Tensor,
    state_table_out: torch.Tensor,
    kv_table_out: torch.Tensor,
) -> None:
    """Copy R rows into the first of R' padded ones.

    Given: five numbers of each row int32 [R], token_ids int64 [T], tables int32 [R, columns]. Written: numbers_out
    int32 [4, R'] (the given ones but query_start), tokens_out int64 [R' * W], place_out int64 [R' * W] (of the first T:
    each given token's place in tokens_out), state_table_out int32 [R', columns], kv_table_out, which may be wider.
    """
    num_given, (_, num_rows) = len(query_len), numbers_out.shape
    numbers_out.zero_()
    numbers_out[:, :num_given] = torch.stack([query_len, num_computed, running_column, num_accepted])
    place = _places(query_start, query_len, len(tokens_out) // num_rows)
    place_out[: len(place)] = place
    tokens_out[place] = token_ids
    state_table_out[:num_given] = state_table
    kv_table_out[:num_given, : kv_table.shape[1]] = kv_table


def pad_sampled_reference(
    query_start: torch.Tensor,
    query_len: torch.Tensor,
    sampled: torch.Tensor,
    num_final: torch.Tensor,
    sampled_out: torch.Tensor,
    final_out: torch.Tensor,
) -> None:
    """Copy one token for each of R rows' tokens, int64 [T], and a count of each row, int32 [R], into padded ones.

    Written: sampled_out int64 [R' * W], final_out int32 [R'].
    """
    final_out.zero_()
    final_out[: len(num_final)] = num_final
    sampled_out[_places(query_start, query_len, len(sampled_out) // len(final_out))] = sampled


def _places(query_start: torch.Tensor, query_len: torch.Tensor, width: int) -> torch.Tensor:
    """Of every token of rows that lie one after the other, its place among rows of `width`: int64 [T]."""
    first = torch.arange(len(query_len), device=query_len.device) * width - query_start
    lengths = query_len.long()
    shift = first.repeat_interleave(lengths)
    return shift + torch.arange(len(shift), device=shift.device)


def pad_rows(*arguments: torch.Tensor) -> None:
    """`pad_rows_reference`."""
    (pad_rows_on_gpu if runs_kernel(arguments[0]) else pad_rows_reference)(*arguments)


def pad_sampled(*arguments: torch.Tensor) -> None:
    """`pad_sampled_reference`."""
    (pad_sampled_on_gpu if runs_kernel(arguments[0]) else pad_sampled_reference)(*arguments)


def pad_rows_on_gpu(
    query_start, query_len, num_computed, running_column, num_accepted, token_ids, state_table, kv_table,
    numbers_out, tokens_out, place_out, state_table_out, kv_table_out,
):  # fmt: skip
    """`pad_rows_reference` by its kernel."""
    given = (query_start, query_len, num_computed, running_column, num_accepted, token_ids, state_table, kv_table)
    written = (numbers_out, tokens_out, place_out, state_table_out, kv_table_out)
    assert all(each.is_contiguous() for each in (*given, *written))
    assert state_table.shape[1] == state_table_out.shape[1] and kv_table.shape[1] <= kv_table_out.shape[1]
    num_rows = numbers_out.shape[1]
    width = len(tokens_out) // num_rows
    pad_rows_kernel[(num_rows,)](
        *given, *written, len(query_len), num_rows, state_table.shape[1], kv_table.shape[1], kv_table_out.shape[1],
        width, triton.next_power_of_2(width), BLOCK, **pdl(query_len.device),
    )  # fmt: skip


def pad_sampled_on_gpu(query_start, query_len, sampled, num_final, sampled_out, final_out):
    """`pad_sampled_reference` by its kernel."""
    assert all(each.is_contiguous() for each in (query_start, query_len, sampled, num_final, sampled_out, final_out))
    width = len(sampled_out) // len(final_out)
    pad_sampled_kernel[(len(final_out),)](
        query_start, query_len, sampled, num_final, sampled_out, final_out, len(num_final),
        width, triton.next_power_of_2(width), num_warps=1, **pdl(sampled.device),
    )  # fmt: skip
