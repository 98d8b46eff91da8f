"""Texts run piece by piece through a model of any family: what the families' tests are made of.

A test builds a checkpoint and an oracle; the checks here run the model over it in every way that a step can be made
up, and compare final hidden states with `torch.equal`, or logits with the oracle's.
"""

import random
from dataclasses import dataclass, field, replace

import torch

from mambalign.kernels.tolerances import tolerance
from mambalign.worker.batch import ScheduledRow
from mambalign.worker.forward_batch import ForwardBatch, StepRows, forward_batch, lay_out
from mambalign.worker.mamba_columns import NULL_BLOCK
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.state_cache import StateCache

MAX_DRAFTS = 7
KV_BLOCK_TOKENS = 16


@dataclass
class Text:
    """A sequence that is run piece by piece: its tokens, its blocks, and how far it is."""

    token_ids: list[int]
    kv_blocks: list[int]
    state_blocks: list[int]
    num_computed: int = 0
    num_accepted: int = 1
    is_decoding: bool = False
    hidden: list[torch.Tensor] = field(default_factory=list)  # of the tokens that are final


class Memory:
    """A poisoned cache, on the model's device, and its free blocks."""

    def __init__(self, model: HybridModel, layout: str, temporal_dtype: torch.dtype = torch.float32, seed: int = 0):
        self.cache = StateCache.allocate(
            model.attention_specs(), model.state_specs(temporal_dtype), num_kv_blocks=128, num_mamba_blocks=96,
            kv_block_tokens=KV_BLOCK_TOKENS, mamba_block_tokens=4096, conv_layout=layout,
            conv_width=model.conv_width, num_spec_tokens=MAX_DRAFTS, device=model.embedding.device, fill=float("nan"),
        )  # fmt: skip
        self.free = {"kv": list(range(1, 128)), "state": list(range(1, 96))}
        for blocks in self.free.values():
            random.Random(seed).shuffle(blocks)

    def text(self, token_ids: list[int]) -> Text:
        num_kv_blocks = -(-(len(token_ids) + MAX_DRAFTS) // KV_BLOCK_TOKENS)
        return Text(token_ids, self._take("kv", num_kv_blocks), self._take("state", 1 + MAX_DRAFTS))

    def _take(self, pool: str, count: int) -> list[int]:
        taken, self.free[pool] = self.free[pool][:count], self.free[pool][count:]
        return taken

    def null_blocks_untouched(self) -> bool:
        tensors = [*self.cache.keys, *self.cache.values, *self.cache.conv, *self.cache.temporal]
        return all(tensor[NULL_BLOCK].isnan().all() for tensor in tensors)


def step_batch(memory: Memory, texts: list[Text], inputs: list[list[int]], boundaries=()) -> ForwardBatch:
    """One pass over `inputs` of each text. boundaries: (text, number of its inputs, block that keeps the state)."""
    scheduled = [
        ScheduledRow("", 0, text.num_computed, ids, text.is_decoding, text.kv_blocks, {}, [], None)
        for text, ids in zip(texts, inputs, strict=True)
    ]
    layout = lay_out(scheduled, memory.cache, resumed=set())
    for i, num_tokens, block in boundaries:
        layout.boundary_block[layout.query_start[i] + num_tokens - 1] = block
    width = max(len(text.state_blocks) for text in texts)
    table = [text.state_blocks + [NULL_BLOCK] * (width - len(text.state_blocks)) for text in texts]
    numbers = [[text.num_computed for text in texts], [0] * len(texts), [text.num_accepted for text in texts], table]
    tensors = (torch.tensor(values, dtype=torch.int32, device=memory.cache.device) for values in numbers)
    return forward_batch(StepRows(layout, *tensors, layout.token_ids), memory.cache)


def run(model: HybridModel, memory: Memory, texts: list[Text], inputs: list[list[int]], boundaries=()) -> torch.Tensor:
    """Run `step_batch`. Returns hidden states [T, hidden]."""
    with torch.inference_mode():
        return model.forward(step_batch(memory, texts, inputs, boundaries), memory.cache)


def run_head(
    model: HybridModel, memory: Memory, text: Text, prev_hidden: torch.Tensor, token_ids: list[int]
) -> torch.Tensor:
    """The MTP head over `token_ids` from where the text is. Returns [T, hidden]."""
    batch = step_batch(memory, [text], [token_ids])
    attention = replace(batch.attention, first_key=1)
    return model.mtp_forward(prev_hidden, batch.token_ids, batch.positions, batch.slot_mapping, attention, memory.cache)


def run_whole(model: HybridModel, token_ids: list[int], temporal_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    memory = Memory(model, "SD", temporal_dtype)
    return run(model, memory, [memory.text(token_ids)], [token_ids])


def random_ids(model: HybridModel, count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, model.vocab_size) for _ in range(count)]


def assert_logits_close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Within the table's tolerance for `dtype`, of the largest magnitude of the oracle's."""
    scale = theirs.abs().max()
    torch.testing.assert_close(ours / scale, theirs / scale, **tolerance("logits", dtype))


@torch.inference_mode()
def check_logits(model: HybridModel, oracle, num_tokens: int = 150) -> None:
    """Logits of a prefill, of one in chunks, and of decode after it are those of `oracle`, transformers' model."""
    token_ids = random_ids(model, num_tokens)
    theirs = oracle(torch.tensor([token_ids])).logits[0]
    assert_logits_close(model.compute_logits(run_whole(model, token_ids)), theirs)
    memory = Memory(model, "SD")
    text = memory.text(token_ids)
    hidden, prompt = [], num_tokens - 10
    for stop in (1, 64, 127, prompt, *range(prompt + 1, num_tokens + 1)):
        text.is_decoding = stop > prompt
        hidden.append(run(model, memory, [text], [token_ids[text.num_computed : stop]]))
        text.num_computed = stop
    assert_logits_close(model.compute_logits(torch.cat(hidden)), theirs)


def advance(text: Text, source: random.Random, vocab_size: int) -> tuple[list[int], int]:
    """Inputs of the text's next step, and how many of them will be final: a piece of prompt, or a token and drafts."""
    rest = text.token_ids[text.num_computed :]
    if not text.is_decoding:
        piece = source.choice((1, 2, 3, 5, 17, 40, len(rest)))
        return rest[:piece], min(piece, len(rest))
    num_drafts = min(source.randint(0, MAX_DRAFTS), len(rest) - 1)
    num_right = source.randint(0, num_drafts)
    drafts = rest[1 : 1 + num_right] + [source.randrange(vocab_size) for _ in range(num_drafts - num_right)]
    return rest[:1] + drafts, 1 + num_right


def check_random_schedule(model: HybridModel, layout: str, seed: int, lengths: list[int]) -> None:
    """Run several texts side by side, in random pieces and with random drafts; every final hidden state is exact."""
    source = random.Random(seed)
    memory = Memory(model, layout, seed=seed)
    texts = [memory.text(random_ids(model, length, seed=length)) for length in lengths]
    prompts = [source.randint(1, length) for length in lengths]
    while waiting := [text for text in texts if text.num_computed < len(text.token_ids)]:
        chosen = source.sample(waiting, source.randint(1, len(waiting)))
        for text in chosen:
            text.is_decoding = text.num_computed >= prompts[texts.index(text)]
        steps = [advance(text, source, model.vocab_size) for text in chosen]
        inputs, kept = zip(*steps, strict=True)
        hidden = run(model, memory, chosen, list(inputs)).split([len(ids) for ids in inputs])
        for text, num_final, row in zip(chosen, kept, hidden, strict=True):
            text.hidden.append(row[:num_final])
            text.num_computed += num_final
            text.num_accepted = num_final if text.is_decoding else 1
    for text in texts:
        assert torch.equal(torch.cat(text.hidden), run_whole(model, text.token_ids)), (
            layout,
            seed,
            len(text.token_ids),
        )
    assert memory.null_blocks_untouched()


def check_every_cut(model: HybridModel, num_tokens: int = 20) -> None:
    """A prompt in two pieces gives the bits of the whole, wherever it is cut."""
    token_ids = random_ids(model, num_tokens)
    whole = run_whole(model, token_ids)
    for cut in range(1, num_tokens):
        memory = Memory(model, "DS", seed=cut)
        text = memory.text(token_ids)
        first = run(model, memory, [text], [token_ids[:cut]])
        text.num_computed = cut
        assert torch.equal(torch.cat([first, run(model, memory, [text], [token_ids[cut:]])]), whole), cut


def check_boundaries(model: HybridModel, layout: str) -> None:
    """A state kept inside a piece of prompt is the state after exactly its tokens."""
    token_ids = random_ids(model, 40)
    whole = run_whole(model, token_ids)
    memory = Memory(model, layout)
    text = memory.text(token_ids)
    run(model, memory, [text], [token_ids[:10]])
    text.num_computed = 10
    at = {1: 61, 2: 62, 3: 63, 17: 64, 30: 65}  # tokens of the second piece -> block
    run(model, memory, [text], [token_ids[10:]], [(0, m, block) for m, block in at.items()])
    for m, block in at.items():
        text.num_computed, text.state_blocks = 10 + m, [block]
        if text.num_computed < len(token_ids):
            rest = run(model, memory, [text], [token_ids[10 + m :]])
            assert torch.equal(rest, whole[10 + m :]), (layout, m)


@torch.inference_mode()
def check_head_pieces(model: HybridModel) -> torch.Tensor:
    """The MTP head gives the same bits in any pieces. Returns its output [59, hidden] for a text of 60 tokens."""
    token_ids = random_ids(model, 60)
    prev_hidden = run_whole(model, token_ids)[:-1]
    outputs = []
    for pieces in ([59], [1, 1, 2, 3, 30, 22]):
        memory = Memory(model, "SD")
        text = memory.text(token_ids)
        text.num_computed, hidden = 1, []
        for piece in pieces:
            start, stop = text.num_computed, text.num_computed + piece
            hidden.append(run_head(model, memory, text, prev_hidden[start - 1 : stop - 1], token_ids[start:stop]))
            text.num_computed = stop
        outputs.append(torch.cat(hidden))
    assert not outputs[0].isnan().any()
    assert torch.equal(*outputs)
    return outputs[0]
