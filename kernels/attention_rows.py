"""The rows of a step, as attention sees them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionRows:
    """R rows of T tokens, over a paged cache. Query i of row r stands at position context_len[r] + i of its text.

    It sees the keys from `first_key` to its own position, those of this step too: they must be in the cache. All
    tensors lie on the caches' device. The two maxima are upper bounds known to the host; they shape launches only, so
    a captured launch serves every step below its bounds.
    """

    query_start: torch.Tensor  # int32 [R] first token of the row
    query_len: torch.Tensor  # int32 [R] tokens of the row; 0: an inert row, nothing is read or written for it
    context_len: torch.Tensor  # int32 [R] tokens before the row's first query
    block_table: torch.Tensor  # int32 [R, W] KV blocks in the order of the text; entries past its end: any valid id
    max_query_len: int  # >= every query_len
    max_context_len: int  # >= every context_len + query_len
    first_key: int = 0  # keys before it are seen by nobody
