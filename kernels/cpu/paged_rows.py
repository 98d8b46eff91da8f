"""What the CPU kernels over paged states share: tensors as addresses, threads, states in and out of their blocks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numba import carray, njit

from mambalign.kernels.activation import SOFTPLUS_LINEAR_ABOVE
from mambalign.kernels.cpu.vector_rows import as_pointer
from mambalign.kernels.rows import MambaRows

LINEAR_ABOVE = np.float32(SOFTPLUS_LINEAR_ABOVE)
SHARED_ABOVE = 1 << 21  # state elements to update (one takes 0.1 ns) from which threads share a call


def ints(count: int) -> str:
    """Of a compiled signature. Tensors come as addresses: 0.1 us each, a numpy view of a view takes 4."""
    return ", ".join(["int64"] * count)


def address_of(tensor: torch.Tensor) -> int:
    """Of the first element of a view whose tokens may lie further apart than they are wide; each is dense."""
    shape, strides = tensor.shape, tensor.stride()
    dense = strides[-1] == 1 and (len(shape) != 3 or shape[1] == 1 or strides[1] == shape[2])
    assert dense, f"strides {strides} of shape {shape}"
    return tensor.data_ptr()


def row_addresses(rows: MambaRows) -> tuple[int, ...]:
    fields = (rows.query_start, rows.query_len, rows.conv_block, rows.conv_offset)
    fields += (rows.temporal_block, rows.is_decode, rows.state_block)
    return (*(field.data_ptr() for field in fields), len(rows.query_start))


def deferral_addresses(rows: MambaRows) -> tuple[int, ...]:
    deferral = rows.deferral
    fields = (deferral.is_deferring, deferral.num_replays, deferral.replay_block)
    return (*(field.data_ptr() for field in fields), deferral.replay_block.shape[1])


def share(run: Callable[[int, int], None], width: int, work: int, unit: int = 1) -> None:
    """run(first, last) over 0 .. width, by several threads when it is worth their start."""
    threads = torch.get_num_threads() if work > SHARED_ABOVE else 1
    step = -(-width // (threads * unit)) * unit
    parts = [(first, min(first + step, width)) for first in range(0, width, step)]
    others = [_threads().submit(run, *part) for part in parts[1:]]
    run(*parts[0])
    for other in others:
        other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), "paged_rows")


@njit
def floats_at(address, shape):
    return carray(as_pointer(address), shape, np.float32)


@njit
def ints_at(address, shape):
    return carray(as_pointer(address), shape, np.int32)


@njit
def copy_values(out, values):
    for i in range(out.shape[0]):
        out[i] = values[i]


@njit
def read_state(state, memory, place, head_dim, d_state):
    """state [rows, lanes], larger than [head_dim, d_state] when that is odd, = what lies at `place`."""
    if state.shape[1] == d_state:
        copy_values(state.reshape(-1)[: head_dim * d_state], memory[place : place + head_dim * d_state])
    else:
        for p in range(head_dim):
            copy_values(state[p, :d_state], memory[place + p * d_state : place + (p + 1) * d_state])


@njit
def leave_state(state, memory, place, head_dim, d_state):
    if state.shape[1] == d_state:
        copy_values(memory[place : place + head_dim * d_state], state.reshape(-1)[: head_dim * d_state])
    else:
        for p in range(head_dim):
            copy_values(memory[place + p * d_state : place + (p + 1) * d_state], state[p, :d_state])


@njit
def leave_inputs(memory, place, vector, rows, first, second):
    """What the state takes of a token, at the beginning of a head's state: a vector, a value a row, two numbers."""
    num_columns, end = vector.shape[0], place + vector.shape[0] + rows.shape[0]
    copy_values(memory[place : place + num_columns], vector)
    copy_values(memory[place + num_columns : end], rows)
    memory[end], memory[end + 1] = first, second


@njit
def read_inputs(memory, place, vector, rows):
    """As `leave_inputs` left them; returns the two numbers."""
    num_columns, end = vector.shape[0], place + vector.shape[0] + rows.shape[0]
    copy_values(vector, memory[place : place + num_columns])
    copy_values(rows, memory[place + num_columns : end])
    return memory[end], memory[end + 1]
