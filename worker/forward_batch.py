"""One step as tensors: which tokens run, and where their KV and states live. Owns no memory but its own.

`StepLayout` is what the host knows, sent to the device in one transfer. `StepRows` adds what only the device may know
(V2): how far each row is, where its live state lies, which tokens it runs. `forward_batch` turns both into addresses,
on the device, without reading anything back.
"""

from dataclasses import dataclass

import numpy as np
import torch

from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.rows import MambaRows, ScanRows
from mambalign.kernels.step_addresses import state_blocks, token_slots
from mambalign.worker.batch import ScheduledRow
from mambalign.worker.host_copy import send_together
from mambalign.worker.state_cache import StateCache

NO_TOKEN = -1  # a position whose token the device fills in, or a draft that is not there: equal to no token
NO_BLOCK = -1  # nothing is kept


@dataclass(frozen=True)
class StepLayout:
    """R rows of T tokens, N of which are sampled from: shapes on the host, index lists on the device.

    Tokens `query_start[r] .. query_start[r] + query_len[r] - 1` are row r's. A token that belongs to no row (padding
    behind a row's last) is inert: it is computed and written nowhere.
    """

    num_rows: int
    num_tokens: int
    num_samples: int
    max_query_len: int
    max_context_len: int  # at least every row's tokens, those of this step included
    all_decode: bool
    query_start: torch.Tensor  # int32 [R]
    query_len: torch.Tensor  # int32 [R]
    is_decode: torch.Tensor  # int32 [R]
    samples_of_row: torch.Tensor  # int32 [R]: a decode row samples after each token, a prompt after its last
    sample_start: torch.Tensor  # int32 [R], the row's first in the list of samples
    drafting: torch.Tensor  # int64 [.], rows that sample
    resumed: torch.Tensor  # int64 [.], rows that begin behind a cached prefix with this step
    row_of_token: torch.Tensor  # int64 [T]
    offset_of_token: torch.Tensor  # int64 [T], within the row
    token_ids: torch.Tensor  # int64 [T], NO_TOKEN where the device knows
    next_token_ids: torch.Tensor  # int64 [T], the token after each; NO_TOKEN where it is sampled
    boundary_block: torch.Tensor  # int64 [T], of tokens that end at a boundary that is asked for; else NO_BLOCK
    sample_index: torch.Tensor  # int64 [N], the token that each sample follows
    kv_table: torch.Tensor  # int32 [R, W], 0 past the row's blocks
    resumed_len: torch.Tensor | None = None  # int32, of `resumed`: 1, or 0 for a row that is not; None: all are
    is_by_chunk: torch.Tensor | None = None  # int32 [R], `num_by_chunk` of them 1; may be None without any
    num_by_chunk: int = 0
    slots: torch.Tensor | None = None  # int32 [R] (V2)
    mamba_table: torch.Tensor | None = None  # int32 [R, columns] of state blocks (V2)


def lay_out(
    rows: list[ScheduledRow],
    cache: StateCache,
    resumed: set[str],
    slots: list[int] | None = None,
    num_columns: int = 0,
) -> StepLayout:
    """Lay a step's rows side by side. `resumed`: requests that begin with it, some of their text cached.

    slots (V2): of each row. num_columns: width of the rows' tables of state blocks, which go with the slots.
    """
    query_len = np.array([row.num_tokens for row in rows])
    query_start = np.cumsum(query_len) - query_len
    num_tokens = int(query_len.sum())
    is_decode = np.array([row.is_decode for row in rows])
    samples = np.array([row.num_samples for row in rows])
    by_chunk = np.array([row.by_chunk for row in rows])
    row_of_token = np.repeat(np.arange(len(rows)), query_len)
    offset = np.arange(num_tokens) - query_start[row_of_token]
    token_ids = np.array([token for row in rows for token in row.token_ids])
    next_token_ids = np.append(token_ids[1:], NO_TOKEN)
    next_token_ids[query_start + query_len - 1] = [
        NO_TOKEN if row.next_token_id is None else row.next_token_id for row in rows
    ]
    boundary_block = np.full(num_tokens, NO_BLOCK)
    for start, row in zip(query_start.tolist(), rows, strict=True):
        for m in row.boundaries:
            column = m // cache.mamba_block_tokens - 1
            boundary_block[start + m - row.num_computed_tokens - 1] = row.mamba_blocks[column]
    kv_table = np.zeros((len(rows), max(len(row.kv_blocks) for row in rows)), np.int32)
    for i, row in enumerate(rows):
        kv_table[i, : len(row.kv_blocks)] = row.kv_blocks
    is_sampled = offset >= (query_len - samples)[row_of_token]
    of_rows = {
        "query_start": query_start,
        "query_len": query_len,
        "is_decode": is_decode,
        "samples_of_row": samples,
        "sample_start": np.cumsum(samples) - samples,
    }
    if by_chunk.any():
        of_rows["is_by_chunk"] = by_chunk
    if slots is not None:
        of_rows |= {"slots": np.array(slots), "mamba_table": mamba_tables([r.mamba_blocks for r in rows], num_columns)}
    lists = {
        "drafting": np.flatnonzero(samples),
        "resumed": np.array([i for i, row in enumerate(rows) if row.request_id in resumed], np.int64),
        "row_of_token": row_of_token,
        "offset_of_token": offset,
        "token_ids": token_ids,
        "next_token_ids": next_token_ids,
        "boundary_block": boundary_block,
        "sample_index": np.flatnonzero(is_sampled),
    }
    of_rows = {name: array.astype(np.int32) for name, array in of_rows.items()}
    return StepLayout(
        num_rows=len(rows),
        num_tokens=num_tokens,
        num_samples=int(samples.sum()),
        max_query_len=int(query_len.max()),
        max_context_len=kv_table.shape[1] * cache.kv_block_tokens,
        all_decode=bool(is_decode.all()),
        num_by_chunk=int(by_chunk.sum()),
        **send_together(of_rows | lists | {"kv_table": kv_table}, cache.device),
    )


def mamba_tables(tables: list[dict[int, int]], num_columns: int) -> np.ndarray:
    """int32 [R, num_columns]: the state blocks that rows hold, by column; 0 where a row holds none."""
    array = np.zeros((len(tables), num_columns), np.int32)
    for row, blocks in zip(array, tables, strict=True):
        for column, block in blocks.items():
            row[column] = block
    return array


@dataclass(frozen=True)
class StepRows:
    """A step's rows after `preprocess_mamba`: int32 [R] on the device, but for the table and the tokens."""

    layout: StepLayout
    num_computed: torch.Tensor  # n
    running_column: torch.Tensor
    num_accepted: torch.Tensor
    mamba_table: torch.Tensor  # int32 [R, columns]
    token_ids: torch.Tensor  # int64 [T]; NO_TOKEN where a draft is missing


@dataclass(frozen=True)
class ForwardBatch:
    """One pass of the target model over T tokens of R rows."""

    token_ids: torch.Tensor  # int64 [T]; NO_TOKEN where a draft is missing
    positions: torch.Tensor  # int64 [T], absolute
    slot_mapping: torch.Tensor  # int64 [T]: KV block * kv_block_tokens + offset; negative: not written
    attention: AttentionRows
    mamba: MambaRows
    scan: ScanRows


def forward_batch(rows: StepRows, cache: StateCache) -> ForwardBatch:
    """Addresses of a step (DESIGN section 2): what each row reads, and where each token leaves its state."""
    layout = rows.layout
    tokens = (layout.row_of_token, layout.offset_of_token)
    positions, slots = token_slots(*tokens, rows.num_computed, layout.query_len, layout.kv_table, cache.kv_block_tokens)
    state_block, conv_block, temporal_block, conv_offset, deferral = state_blocks(
        *tokens,
        layout.boundary_block,
        layout.query_len,
        layout.is_decode,
        rows.num_computed,
        rows.running_column,
        rows.num_accepted,
        rows.mamba_table,
        cache.num_spec_tokens,
        cache.defer_within,
    )
    mamba = MambaRows(
        query_start=layout.query_start,
        query_len=layout.query_len,
        conv_block=conv_block,
        conv_offset=conv_offset,
        temporal_block=temporal_block,
        is_decode=layout.is_decode,
        state_block=state_block,
        max_query_len=layout.max_query_len,
        all_decode=layout.all_decode,
        deferral=deferral,
    )
    return ForwardBatch(
        token_ids=rows.token_ids,
        positions=positions,
        slot_mapping=slots,
        attention=AttentionRows(
            query_start=layout.query_start,
            query_len=layout.query_len,
            context_len=rows.num_computed,
            block_table=layout.kv_table,
            max_query_len=layout.max_query_len,
            max_context_len=layout.max_context_len,
            first_key=0,
        ),
        mamba=mamba,
        scan=ScanRows.split(mamba, layout.is_by_chunk, layout.num_by_chunk),
    )
