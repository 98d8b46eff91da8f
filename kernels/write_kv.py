"""New keys and values into a paged cache, on a GPU."""

import torch
import triton
import triton.language as tl

from mambalign.kernels.dependent_launch import pdl, wait_for_inputs


@triton.jit(
    do_not_specialize=["key_stride", "value_stride"], do_not_specialize_on_alignment=["p_key", "p_value", "p_slot"]
)
def write_kv_kernel(
    p_key_cache,
    p_value_cache,
    p_key,
    p_value,
    p_slot,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """cache[slot[t]] = token t, for keys and values.

    Grid: (tokens, tiles of the WIDTH = kv_heads * head_dim numbers of a token). A program owns one tile of one token;
    a negative slot is skipped. Reads keys, values and slots; writes the caches. Numbers are moved, not computed with.
    """
    wait_for_inputs(PDL)
    i_token, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(p_slot + i_token)
    if slot >= 0:
        o_number = i_tile * BLOCK + tl.arange(0, BLOCK)
        mask = o_number < WIDTH
        b_key = tl.load(p_key + i_token * key_stride + o_number, mask=mask)
        b_value = tl.load(p_value + i_token * value_stride + o_number, mask=mask)
        tl.store(p_key_cache + slot * WIDTH + o_number, b_key, mask=mask)
        tl.store(p_value_cache + slot * WIDTH + o_number, b_value, mask=mask)


def launch_write(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`write_kv_varlen` by its Triton kernel."""
    width = key.shape[1] * key.shape[2]
    block = min(1024, triton.next_power_of_2(width))
    write_kv_kernel[(key.shape[0], triton.cdiv(width, block))](
        key_cache, value_cache, key, value, slot_mapping, key.stride(0), value.stride(0), width, block,
        num_warps=4, **pdl(key.device),
    )  # fmt: skip
