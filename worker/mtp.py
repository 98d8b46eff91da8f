"""The MTP proposer: drafts S tokens a row with the model's own prediction head, greedily.

Drafter slot p holds (hidden state of p-1, token p), so it depends on tokens <= p only and is valid for every text
that shares the prefix. Slot 0 has no input and is masked. Each step first fills the slots of every token just
committed, with the target's hidden states, over what earlier feedback drafts left there; then S-1 feedback passes
draft on from the last slot. Nothing of the drafter's ever reaches the text.
"""

import torch

from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.sampling import argmax_rows
from mambalign.kernels.step_addresses import token_slots
from mambalign.worker.forward_batch import NO_TOKEN, StepRows
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.layers import OutputTokens
from mambalign.worker.state_cache import StateCache

FIRST_KEY = 1  # slot 0 is empty


class MtpProposer:
    """Fills the drafter's slots for every row, then drafts `num_spec_tokens` tokens for the rows that sampled."""

    def __init__(self, model: HybridModel, cache: StateCache, num_spec_tokens: int):
        self.model = model
        self.cache = cache
        self.num_spec_tokens = num_spec_tokens

    def resume(self, rows: StepRows, temporal_block: torch.Tensor) -> None:
        """Fill slot n of rows that begin behind a cached prefix, from the hidden state that their checkpoint carries.

        Before the target's pass, which overwrites the carry. temporal_block int32 [R].
        """
        layout, resumed = rows.layout, rows.layout.resumed
        carry = self.cache.carry[temporal_block[resumed]]
        token_ids = rows.token_ids[layout.query_start[resumed]]
        position = rows.num_computed[resumed]
        self._one_token_each(carry, token_ids, layout.kv_table[resumed], position, torch.ones_like(position))

    def propose(
        self, rows: StepRows, hidden: torch.Tensor, next_ids: torch.Tensor, num_final: torch.Tensor
    ) -> torch.Tensor:
        """Draft from the target's hidden states.

        hidden [T, hidden]; next_ids int64 [T], the token after each; num_final int32 [R], tokens of each row that are
        final. Returns int64 [R, S]; NO_TOKEN in rows that did not sample.
        """
        layout, row = rows.layout, rows.layout.row_of_token
        first = rows.num_computed + 1  # the position of the token after the row's first
        positions, slots = token_slots(
            row, layout.offset_of_token, first, num_final, layout.kv_table, self.cache.kv_block_tokens
        )
        attention = self._attention(layout.query_start, num_final, first, layout.kv_table, layout.max_query_len)
        inputs = (hidden, next_ids, positions, slots, attention, self.cache)
        drafts = torch.full((layout.num_rows, self.num_spec_tokens), NO_TOKEN, device=hidden.device)
        if not layout.num_samples:
            self.model.mtp_forward(*inputs)
            return drafts
        last = layout.query_start + (num_final - 1).clamp_(min=0)
        position, table, query_len = first + num_final, layout.kv_table, num_final.clamp(max=1)
        drafting = layout.drafting
        if len(drafting) < layout.num_rows:
            last, position, table, query_len = (t[drafting] for t in (last, position, table, query_len))
        if self.model.mtp_keys_come_first:
            query_start = torch.arange(len(last), dtype=torch.int32, device=last.device)
            outputs = OutputTokens(last.long(), self._attention(query_start, query_len, position - 1, table, 1))
            hidden = self.model.mtp_forward(*inputs, outputs)
        else:
            hidden = self.model.mtp_forward(*inputs).index_select(0, last)
        steps = self._feed_back(hidden, table, position, query_len)
        if len(drafting) < layout.num_rows:
            return drafts.index_copy_(0, drafting, steps)
        return steps

    def _feed_back(
        self, hidden: torch.Tensor, kv_table: torch.Tensor, position: torch.Tensor, query_len: torch.Tensor
    ) -> torch.Tensor:
        """Greedy drafts int64 [D, S] from the head's output [D, hidden] at each row's last filled slot."""
        steps = [argmax_rows(self.model.mtp_logits(hidden))]
        for _ in range(self.num_spec_tokens - 1):
            hidden = self._one_token_each(hidden, steps[-1], kv_table, position, query_len)
            steps.append(argmax_rows(self.model.mtp_logits(hidden)))
            position = position + 1
        return torch.stack(steps, dim=1)

    def _one_token_each(
        self,
        prev_hidden: torch.Tensor,
        token_ids: torch.Tensor,
        kv_table: torch.Tensor,
        position: torch.Tensor,
        query_len: torch.Tensor,
    ) -> torch.Tensor:
        """Run the head over one token of each row, at `position` int32 [D]; rows of query_len 0 write nothing."""
        query_start = torch.arange(len(position), dtype=torch.int32, device=position.device)
        positions, slots = token_slots(None, None, position, query_len, kv_table, self.cache.kv_block_tokens)
        attention = self._attention(query_start, query_len, position, kv_table, 1)
        return self.model.mtp_forward(prev_hidden, token_ids, positions, slots, attention, self.cache)

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
