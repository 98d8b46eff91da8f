"""The MTP proposer: drafts S tokens a row with the model's own prediction head, greedily.

Drafter slot p holds (hidden state of p-1, token p), so it depends on tokens <= p only and is valid for every text
that shares the prefix. Slot 0 has no input and is masked. Each step first fills the slots of every token just
committed, with the target's hidden states, over what earlier feedback drafts left there; then S-1 feedback passes
draft on from the last slot. Nothing of the drafter's ever reaches the text.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from mambalign.worker.forward_batch import AttentionBatch
from mambalign.worker.state_cache import StateCache


class DraftModel(Protocol):
    def mtp_forward(
        self, prev_hidden: torch.Tensor, token_ids: torch.Tensor, attention: AttentionBatch, cache: StateCache
    ) -> torch.Tensor: ...

    def mtp_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class DraftRow:
    """One row's committed tokens: `token_ids[i]` at position `first_position + i`, after `prev_hidden[i]`."""

    prev_hidden: torch.Tensor  # [k, hidden], k >= 1
    token_ids: list[int]  # [k]
    first_position: int  # >= 1
    kv_blocks: list[int]
    wants_drafts: bool  # False while a prompt is still being read


class MtpProposer:
    """Fills the drafter's slots for every row, then drafts `num_spec_tokens` tokens for the rows that want them."""

    def __init__(self, model: DraftModel, cache: StateCache, num_spec_tokens: int):
        self.model = model
        self.cache = cache
        self.num_spec_tokens = num_spec_tokens

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        """Drafts of each row, [] for rows that want none."""
        lens = [len(row.token_ids) for row in rows]
        attention = attention_batch([r.kv_blocks for r in rows], [r.first_position for r in rows], lens, self.cache)
        token_ids = torch.tensor([t for row in rows for t in row.token_ids])
        hidden = self.model.mtp_forward(torch.cat([r.prev_hidden for r in rows]), token_ids, attention, self.cache)
        last = torch.tensor(lens).cumsum(0) - 1
        drafting = [i for i, row in enumerate(rows) if row.wants_drafts]
        drafts: list[list[int]] = [[] for _ in rows]
        if drafting:
            chosen = [rows[i] for i in drafting]
            for i, tokens in zip(drafting, self._feed_back(chosen, hidden[last[drafting]]), strict=True):
                drafts[i] = tokens
        return drafts

    def _feed_back(self, rows: list[DraftRow], hidden: torch.Tensor) -> list[list[int]]:
        """Greedy drafts from the head's output `hidden` [rows, hidden] at each row's last filled slot."""
        blocks = [row.kv_blocks for row in rows]
        position = [row.first_position + len(row.token_ids) for row in rows]
        steps = [self.model.mtp_logits(hidden).argmax(-1)]
        for _ in range(self.num_spec_tokens - 1):
            attention = attention_batch(blocks, position, [1] * len(rows), self.cache)
            hidden = self.model.mtp_forward(hidden, steps[-1], attention, self.cache)
            steps.append(self.model.mtp_logits(hidden).argmax(-1))
            position = [p + 1 for p in position]
        return torch.stack(steps, dim=1).tolist()


def attention_batch(
    kv_blocks: list[list[int]], context_lens: list[int], query_lens: list[int], cache: StateCache, first_key: int = 1
) -> AttentionBatch:
    """Lay out R rows of queries over their KV blocks; `first_key` 1 masks the drafter's empty slot 0."""
    size = cache.kv_block_tokens
    width = max(map(len, kv_blocks))
    table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in kv_blocks], dtype=torch.int32)
    slots = [
        blocks[p // size] * size + p % size
        for blocks, start, length in zip(kv_blocks, context_lens, query_lens, strict=True)
        for p in range(start, start + length)
    ]
    return AttentionBatch(query_lens, context_lens, table, torch.tensor(slots), first_key)
