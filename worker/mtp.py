"""The MTP proposer: drafts S tokens a row with the model's own prediction head, greedily.

Drafter slot p holds (hidden state of p-1, token p), so it depends on tokens <= p only and is valid for every text
that shares the prefix. Slot 0 has no input and is masked. Each step first fills the slots of every token just
committed, with the target's hidden states, over what earlier feedback drafts left there; then S-1 feedback passes
draft on from the last slot. Nothing of the drafter's ever reaches the text.
"""

import torch

from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.draft_addresses import draft_addresses
from mambalign.kernels.gather_rows import gather_rows
from mambalign.kernels.step_addresses import token_slots
from mambalign.worker.forward_batch import NO_TOKEN, StepRows
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.layers import OutputTokens
from mambalign.worker.state_cache import StateCache

FIRST_KEY = 1  # slot 0 is empty


class MtpProposer:
    """Fills the drafter's slots for every row, then drafts `num_spec_tokens` tokens for the rows that sampled."""

    def __init__(self, model: HybridModel, cache: StateCache, num_spec_tokens: int, max_num_seqs: int):
        self.model = model
        self.cache = cache
        self.num_spec_tokens = num_spec_tokens
        self._one_each = torch.arange(max_num_seqs, dtype=torch.int32, device=cache.device)  # rows of one token

    def resume(self, rows: StepRows, temporal_block: torch.Tensor) -> None:
        """Fill slot n of rows that begin behind a cached prefix, from the hidden state that their checkpoint carries.

        Before the target's pass, which overwrites the carry. temporal_block int32 [R].
        """
        layout, resumed = rows.layout, rows.layout.resumed
        carry = self.cache.carry[temporal_block[resumed]]
        token_ids = rows.token_ids[layout.query_start[resumed]]
        position = rows.num_computed[resumed]
        query_len = torch.ones_like(position) if layout.resumed_len is None else layout.resumed_len
        kv_table = layout.kv_table[resumed]
        positions, slots = token_slots(None, None, position, query_len, kv_table, self.cache.kv_block_tokens)
        attention = self._attention(self._one_each[: len(position)], query_len, position, kv_table, 1)
        self.model.mtp_forward(carry, token_ids, positions, slots, attention, self.cache)

    def propose(
        self, rows: StepRows, hidden: torch.Tensor, next_ids: torch.Tensor, num_final: torch.Tensor
    ) -> torch.Tensor:
        """Draft from the target's hidden states.

        hidden [T, hidden]; next_ids int64 [T], the token after each; num_final int32 [R], tokens of each row that are
        final. Returns int64 [R, S]; NO_TOKEN in rows that did not sample.
        """
        layout, block_tokens = rows.layout, self.cache.kv_block_tokens
        drafting = layout.drafting if len(layout.drafting) < layout.num_rows else None
        at = draft_addresses(
            layout.query_start,
            rows.num_computed,
            num_final,
            drafting,
            layout.kv_table,
            self.num_spec_tokens,
            block_tokens,
        )
        positions, slots = token_slots(
            layout.row_of_token, layout.offset_of_token, at.first, num_final, layout.kv_table, block_tokens
        )
        attention = self._attention(layout.query_start, num_final, at.first, layout.kv_table, layout.max_query_len)
        inputs = (hidden, next_ids, positions, slots, attention, self.cache)
        if not layout.num_samples:
            self.model.mtp_forward(*inputs)
            return self._no_drafts(layout.num_rows)
        one_each = self._one_each[: len(at.last)]
        kv_table = layout.kv_table if drafting is None else layout.kv_table[drafting]
        passes = [self._attention(one_each, at.query_len, each, kv_table, 1) for each in at.context_len]
        if self.model.mtp_keys_come_first:
            hidden = self.model.mtp_forward(*inputs, OutputTokens(at.last, passes[0]))
        else:
            hidden = gather_rows(self.model.mtp_forward(*inputs), at.last)
        drafts = torch.empty(len(at.last), self.num_spec_tokens, dtype=torch.int64, device=hidden.device)
        self.model.draft_tokens(hidden, drafts[:, 0])
        for i in range(1, self.num_spec_tokens):
            inputs = (hidden, drafts[:, i - 1], at.positions[i], at.slots[i], passes[i], self.cache)
            hidden = self.model.mtp_forward(*inputs)
            self.model.draft_tokens(hidden, drafts[:, i])
        return drafts if drafting is None else self._no_drafts(layout.num_rows).index_copy_(0, drafting, drafts)

    def _no_drafts(self, num_rows: int) -> torch.Tensor:
        return torch.full((num_rows, self.num_spec_tokens), NO_TOKEN, device=self.cache.device)

    def _attention(self, query_start, query_len, context_len, kv_table, max_query_len: int) -> AttentionRows:
        return AttentionRows(
            query_start=query_start,
            query_len=query_len,
            context_len=context_len,
            block_table=kv_table,
            max_query_len=max_query_len,
            max_context_len=kv_table.shape[1] * self.cache.kv_block_tokens,
            first_key=FIRST_KEY,
        )
