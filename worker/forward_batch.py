"""The shape of one forward pass: which tokens run, and where their KV and state live.

Owns no memory. A runner builds these from a `SchedulerOutput`; models and kernels read them.
Lists are host integers (loops, shapes); tensors are on the model's device.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """Where R rows of queries, T tokens in all, find and put their keys and values.

    Row r's queries are the positions `context_lens[r] .. context_lens[r] + query_lens[r] - 1`; it sees the keys
    `first_key .. its own position`. Keys before `context_lens[r]` are in the cache already.
    """

    query_lens: list[int]  # [R], each >= 1
    context_lens: list[int]  # [R]
    block_table: torch.Tensor  # [R, max blocks a row], int32, entries past the row's length are 0
    slot_mapping: torch.Tensor  # [T], int64: block id * kv_block_tokens + offset
    first_key: int = 0  # 1 for the drafter, whose slot 0 has no input


@dataclass(frozen=True)
class Boundary:
    """A state to keep from inside a prefill row: the one after `num_tokens` of the row's tokens, into `block_id`."""

    row: int
    num_tokens: int  # 1 .. query_len
    block_id: int


@dataclass(frozen=True)
class MambaBatch:
    """Where R rows find and leave their recurrent states (DESIGN section 2, after `preprocess_mamba`).

    A decode row reads column `running_column + num_accepted - 1`, and leaves the temporal state (and carry) of its
    token j in column `running_column + j`; its conv window starts at slot `num_accepted - 1`. A prefill row reads and
    leaves `running_column`; with `has_state` False it starts from zeros and reads no block.
    """

    query_lens: list[int]  # [R]
    is_decode: list[bool]  # [R]
    has_state: list[bool]  # [R], n > 0
    running_column: list[int]  # [R]
    num_accepted: list[int]  # [R], 1 for prefill rows
    block_table: list[dict[int, int]]  # [R], column -> block id, the columns that the row holds
    boundaries: list[Boundary]
    conv_layout: str  # "SD" or "DS"


@dataclass(frozen=True)
class ForwardBatch:
    """One pass of the target model over T tokens of R rows."""

    input_ids: torch.Tensor  # [T], int64
    positions: torch.Tensor  # [T], int64, absolute
    attention: AttentionBatch
    mamba: MambaBatch
