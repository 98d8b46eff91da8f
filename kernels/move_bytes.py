"""Bytes moved between raw addresses by one program: what the scalar and the fused migration kernels share."""

import triton
import triton.language as tl


@triton.jit
def _move_elements(source, dest, num_elements, ELEMENT: tl.constexpr, ALIGNMENT: tl.constexpr, AT_A_TIME: tl.constexpr):
    p_source, p_dest = source.to(tl.pointer_type(ELEMENT)), dest.to(tl.pointer_type(ELEMENT))
    for start in range(0, num_elements, AT_A_TIME):
        o = start + tl.arange(0, AT_A_TIME)
        mask = o < num_elements
        value = tl.load(tl.multiple_of(p_source + o, ALIGNMENT), mask=mask)
        tl.debug_barrier()  # every thread has read before one writes
        tl.store(tl.multiple_of(p_dest + o, ALIGNMENT), value, mask=mask)


@triton.jit
def move_bytes(source, dest, num_bytes, access_size, COPY_BLOCK_SIZE: tl.constexpr):
    """num_bytes between any addresses, like memmove for a move to the left. access_size 16: all are multiples of 16."""
    if access_size == 16:
        _move_elements(source, dest, num_bytes // 8, tl.uint64, 16, COPY_BLOCK_SIZE // 16)
    else:
        _move_elements(source, dest, num_bytes, tl.uint8, 1, COPY_BLOCK_SIZE // 8)
