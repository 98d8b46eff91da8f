"""What every family is to the engine: token ids to hidden states, hidden states to logits, and what it remembers.

A family's file says what its config.json means, which weights a layer takes and in which order the layers compute; a
model holds weights and no state.
"""

from typing import Any, Protocol

import torch

from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.draft_head import DraftHead, draft_tokens, quantize_head
from mambalign.kernels.gather_rows import gather_rows
from mambalign.kernels.linear import linear
from mambalign.kernels.sampling import argmax_rows
from mambalign.worker.forward_batch import ForwardBatch
from mambalign.worker.models.layers import ForwardContext, Linear, OutputTokens, RMSNorm
from mambalign.worker.models.loader import Weights
from mambalign.worker.models.mtp_head import MtpHead
from mambalign.worker.state_cache import AttentionSpec, StateCache, StateSpec


class HybridConfig(Protocol):
    """The fields of a family's parsed config.json that the engine reads; the family's layers read more."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_id: tuple[int, ...]
    tie_word_embeddings: bool
    conv_width: int  # taps of the causal convs

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "HybridConfig":
        """Read a published config.json. Raises CheckpointError for what cannot be served, naming the field."""
        ...

    def attention_specs(self, dtype: torch.dtype, with_drafter: bool) -> list[AttentionSpec]:
        """KV shape of each attention layer: the target's, then the drafter's. Needs no weight."""
        ...

    def state_specs(self, dtype: torch.dtype, temporal_dtype: torch.dtype, with_drafter: bool) -> list[StateSpec]:
        """Recurrent states of each layer that has some, of each kind that it has, and the drafter's carry.

        Needs no weight.
        """
        ...


class Block(Protocol):
    """One layer of the target or the drafter."""

    def linears(self) -> list[Linear]:
        """Every linear layer in it."""
        ...


class HybridModel:
    """Base of the families' models. A subclass defines `run`, and builds `blocks`, `final_norm` and `mtp`."""

    Config: type[HybridConfig]
    embedding_name = "model.embed_tokens.weight"
    head_name = "lm_head.weight"

    blocks: list[Block]
    final_norm: RMSNorm
    mtp: MtpHead | None = None
    draft_head: DraftHead | None = None  # None: drafts are taken from the target's own head
    chunk_tokens: int | None  # of a prompt, that `--prefill-scan chunked` scans together; None: no layer has a scan

    def __init__(self, config: HybridConfig, weights: Weights):
        self.config, self.dtype = config, weights.dtype
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_model_len = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_id
        self.conv_width = config.conv_width
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = weights.take(self.embedding_name, shape)
        if config.tie_word_embeddings and self.head_name not in weights:
            self.head_weight = self.embedding.t().contiguous()
        else:
            self.head_weight = weights.take_linear(self.head_name, *shape)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden], what the first layer reads. Of a draft that is missing, anything: it is not accepted."""
        return gather_rows(self.embedding, token_ids)

    def run(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """All layers and the final norm over embeddings [T, hidden]."""
        raise NotImplementedError

    @property
    def has_mtp(self) -> bool:
        return self.mtp is not None

    @property
    def mtp_keys_come_first(self) -> bool:
        """The head's first layer is its only one with keys: all slots are filled once it has seen their tokens."""
        has_keys = [hasattr(block.mixer, "kv_index") for block in self.mtp.blocks]
        return has_keys[0] and sum(has_keys) == 1

    def chunks_are_right(self, temporal_dtype: torch.dtype) -> bool:
        """Whether this device's kernels of the scan by chunks give the values of their reference at this model's sizes.

        A family whose kernels were tested at any size need not look.
        """
        return True

    def linear_weights(self) -> list[torch.Tensor]:
        """Every weight that goes through `kernels.linear`."""
        linears = [each for block in self.blocks for each in block.linears()]
        if self.mtp is not None:
            linears += self.mtp.linears()
        return [self.head_weight, *(each.weight for each in linears)]

    def attention_specs(self, with_drafter: bool = True) -> list[AttentionSpec]:
        """KV shape of each attention layer: the target's, then the drafter's."""
        return self.config.attention_specs(self.dtype, with_drafter=with_drafter and self.has_mtp)

    def state_specs(self, temporal_dtype: torch.dtype = torch.float32, with_drafter: bool = True) -> list[StateSpec]:
        """The recurrent states of each layer that has some, and the carry when there is an MTP head."""
        return self.config.state_specs(self.dtype, temporal_dtype, with_drafter=with_drafter and self.has_mtp)

    def forward(self, batch: ForwardBatch, cache: StateCache) -> torch.Tensor:
        """Run the target over the batch's T tokens; leaves keys and states in the cache.

        Returns [T, hidden] after the final norm, in the model's dtype.
        """
        context = ForwardContext(cache, batch.positions, batch.slot_mapping, batch.attention, batch.mamba, batch.scan)
        return self.run(self.embed(batch.token_ids), context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] -> [M, vocab], fp32."""
        return linear(hidden, self.head_weight, out_dtype=torch.float32)

    def mtp_forward(
        self,
        prev_hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        attention: AttentionRows,
        cache: StateCache,
        outputs: OutputTokens | None = None,
    ) -> torch.Tensor:
        """Run the MTP head over T slots; slot p holds (hidden of p-1, token p) and attends to slots 1 .. p.

        prev_hidden [T, hidden]: what `forward` or `mtp_forward` returned for the token before. Returns [T, hidden]
        for `draft_tokens`, and to be fed back for the next draft; with `outputs` (only if `mtp_keys_come_first`) that
        of its tokens, [D, hidden].
        """
        context = ForwardContext(cache, positions, slot_mapping, attention, outputs=outputs)
        return self.mtp(self.embed(token_ids), prev_hidden, context)

    def quantize_draft_head(self) -> None:
        """Take drafts from a copy of the head in fp8 from now on. It takes `draft_head_bytes` of memory."""
        self.draft_head = quantize_head(self.head_weight)

    def draft_tokens(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """[M, hidden] of `mtp_forward` -> the best token of each row, written to out int64 [M] (may be apart)."""
        if self.draft_head is None:
            argmax_rows(self.mtp_logits(hidden), out)
        else:
            draft_tokens(hidden, self.draft_head, out)

    def mtp_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[M, hidden] of `mtp_forward` -> [M, vocab], fp32, through the target's own head."""
        return self.compute_logits(hidden)
