"""The reference engine: what every other path must equal, bit for bit. Read this first.

A hybrid model remembers a text in two ways. Attention layers keep a key and a value of every token, in blocks that a
table lists in order. Mamba layers fold the text into a state of fixed size; a state lives in one block, and is
overwritten as the text goes on. So to generate is: run the prompt once from empty memory (the prefill), sample a
token from the last position's logits, run that token against the memory (a decode step), and so on.

Here one request runs at a time, in memory of its own: no batch, no prefix cache, no drafts, and one state block that
spans the whole text, so that no state ever moves. The engine that serves adds all of those, around the same model,
kernels and sampler; none may change a bit of what comes out.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from mambalign.kernels.attention_rows import AttentionRows
from mambalign.kernels.rows import MambaRows, ScanRows
from mambalign.kernels.sampling import NO_BEST
from mambalign.worker.forward_batch import NO_BLOCK, ForwardBatch
from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.models.registry import load_model
from mambalign.worker.sampler import NOT_NUMBERS, Sampler, SampleRow
from mambalign.worker.sampling_params import SamplingParams, TokenLogprobs
from mambalign.worker.state_cache import StateCache

KV_BLOCK_TOKENS = 16
STATE_BLOCK = 1  # block 0 of either pool means "no block"


@dataclass(frozen=True)
class Generation:
    """What a request gets: its tokens, their log-probabilities where asked for, and why they end."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    finish_reason: str  # "stop": an end-of-text or stop token, which is the last of token_ids; else "length"


class ReferenceEngine:
    """Generates for one request at a time. `model` is a `mambalign.worker.models` model.

    by_chunk: the prompt goes through the chunked scan (`--prefill-scan chunked`), the reply through the recurrence.
    grammars: for requests with `structured_outputs`.
    """

    def __init__(self, model, by_chunk: bool = False, grammars: GrammarCompiler | None = None):
        self.model = model
        self.by_chunk = by_chunk
        self.grammars = grammars
        self.sampler = Sampler(model.eos_token_ids)

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype = torch.float32, by_chunk: bool = False) -> "ReferenceEngine":
        return cls(load_model(path, dtype, show_progress=False), by_chunk)

    @torch.inference_mode()
    def generate(self, prompt_token_ids: list[int], params: SamplingParams, choice: int = 0) -> Generation:
        """Continue a prompt of at least one token. Stop strings are not looked at: no text is made here.

        params: a row that samples needs a seed. choice: which of the request's `n` answers to give. Raises
        FloatingPointError when the model's logits are not numbers.
        """
        grammar = None
        if params.structured_outputs is not None:
            if self.grammars is None:
                raise ValueError("structured_outputs: no grammars were given to follow them with")
            grammar = self.grammars.start(params.structured_outputs)
        max_tokens = min(params.max_tokens, self.model.max_model_len - len(prompt_token_ids))
        cache = self._empty_memory(len(prompt_token_ids) + max_tokens)
        output_token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        num_computed, new_token_ids = 0, list(prompt_token_ids)
        while len(output_token_ids) < max_tokens:
            hidden = self.model.forward(self._one_row(new_token_ids, num_computed, cache), cache)
            num_computed += len(new_token_ids)
            allowed = grammar.masks(output_token_ids, [])[0] if grammar else None
            row = SampleRow(params, prompt_token_ids, output_token_ids, choice, allowed)
            sampled = self.sampler(self.model.compute_logits(hidden[-1:]), [row], torch.tensor([num_computed]))
            if sampled.token_ids == NO_BEST.value:
                raise FloatingPointError(NOT_NUMBERS)
            output_token_ids.append(int(sampled.token_ids))
            logprobs += sampled.logprobs.entries()
            if self._is_end(output_token_ids, params):
                return Generation(output_token_ids, logprobs, "stop")
            new_token_ids = output_token_ids[-1:]
        return Generation(output_token_ids, logprobs, "length")

    def _is_end(self, output_token_ids: list[int], params: SamplingParams) -> bool:
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.model.eos_token_ids))
        return len(output_token_ids) >= params.min_tokens and output_token_ids[-1] in ends

    def _empty_memory(self, num_tokens: int) -> StateCache:
        """KV blocks for `num_tokens` tokens, and one state block (that spans them all)."""
        num_kv_blocks = -(-num_tokens // KV_BLOCK_TOKENS)
        return StateCache.allocate(
            self.model.attention_specs(with_drafter=False),
            self.model.state_specs(with_drafter=False),
            num_kv_blocks=1 + num_kv_blocks,
            num_mamba_blocks=1 + STATE_BLOCK,
            kv_block_tokens=KV_BLOCK_TOKENS,
            mamba_block_tokens=num_kv_blocks * KV_BLOCK_TOKENS,
            conv_layout="SD",
            conv_width=self.model.conv_width,
            num_spec_tokens=0,
        )

    def _one_row(self, token_ids: list[int], num_computed: int, cache: StateCache) -> ForwardBatch:
        """`token_ids` at the positions after `num_computed`: the prompt, or one token against what is remembered."""
        num_tokens, num_kv_blocks = len(token_ids), cache.keys[0].shape[0] if cache.keys else 1
        positions = torch.arange(num_computed, num_computed + num_tokens)

        def one(value: int) -> torch.Tensor:
            return torch.tensor([value], dtype=torch.int32)

        attention = AttentionRows(
            query_start=one(0),
            query_len=one(num_tokens),
            context_len=one(num_computed),
            block_table=torch.arange(1, num_kv_blocks, dtype=torch.int32)[None],  # blocks 1, 2, 3, ... in order
            max_query_len=num_tokens,
            max_context_len=num_computed + num_tokens,
        )
        state_block = torch.full((num_tokens,), NO_BLOCK, dtype=torch.int32)
        state_block[-1] = STATE_BLOCK
        mamba = MambaRows(
            query_start=one(0),
            query_len=one(num_tokens),
            conv_block=one(STATE_BLOCK),
            conv_offset=one(0),
            temporal_block=one(STATE_BLOCK if num_computed else NO_BLOCK),
            is_decode=one(num_computed > 0),
            state_block=state_block,
            max_query_len=num_tokens,
            all_decode=num_computed > 0,
        )
        scan = ScanRows(None, mamba) if self.by_chunk and not num_computed else ScanRows(mamba, None)
        return ForwardBatch(torch.tensor(token_ids), positions, KV_BLOCK_TOKENS + positions, attention, mamba, scan)
