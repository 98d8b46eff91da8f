"""Prompts scanned by chunks: every text is the reference engine's, which scans the prompt by chunks and the reply not.

The switch changes bits (a test says so), so it has a reference of its own; transformers judges the other setting.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from cells import Cell, default_model, default_path
from local_client import LocalClient

from mambalign.engine import LLM, SamplingParams
from mambalign.engine.llm import RequestOutput
from mambalign.engine.option import ConfigError
from mambalign.engine.reference import Generation, ReferenceEngine
from mambalign.kernels.chunk_shape import DELTA_CHUNK, MAMBA2_CHUNK
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.registry import load_model
from mambalign.worker.tests.test_families_on_gpu import CHECKPOINTS


def cells(chunk: int) -> list[Cell]:
    """B, KV block, budget, rows."""
    return [
        Cell("v1", "SD", 3, "mtp", 2 * chunk, 16, chunk + 9, 6),
        Cell("v2", "DS", 3, "ngram", 2 * chunk, 8, 2 * chunk + 7, 8),
        Cell("v2", "SD", 7, "mtp", chunk, 16, 2048, 8),
        Cell("v1", "DS", 0, "mtp", chunk, 16, chunk + 3, 4),
    ]


SHIPPED = "nemotron_h"
OTHERS = ("bamba", "falcon_h1", "granitemoehybrid", "zamba2")
CASES = [(SHIPPED, cell) for cell in cells(MAMBA2_CHUNK)] + [("qwen3_5", cell) for cell in cells(DELTA_CHUNK)[:3]]
CASES += [(name, cells(MAMBA2_CHUNK)[1]) for name in OTHERS] + [("qwen3_next", cells(DELTA_CHUNK)[1])]
TIGHT_CASES = [*CASES[:2], CASES[6]]


@dataclass
class Subject:
    """A model whose prompts are run by chunks."""

    path: Path
    model: HybridModel

    @cached_property
    def reference(self) -> ReferenceEngine:
        return ReferenceEngine(self.model, by_chunk=True)

    def open_engine(self, cell: Cell, pools: str) -> LocalClient:
        options = cell.options(cell.pools(pools), self.model)
        return LocalClient(self.model, model=str(self.path), **options, prefill_scan="chunked")

    def prompts(self, lengths: tuple[int, ...]) -> list[list[int]]:
        rng, vocab_size = random.Random(0), min(300, self.model.vocab_size)
        return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def find_subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """The model that ships, or a small random one of the family."""

    @cache
    def find(name: str) -> Subject:
        if name == SHIPPED:
            return Subject(default_path(), default_model())
        path = CHECKPOINTS[name](tmp_path_factory.mktemp("models") / name)
        return Subject(path, load_model(path, torch.float32, show_progress=False))

    return find


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=2)


def check(outputs: list[RequestOutput], wanted: list[Generation]) -> None:
    for output, want in zip(outputs, wanted, strict=True):
        what = f"prompt of {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} cached"
        assert output.outputs[0].token_ids == want.token_ids, what
        assert output.outputs[0].logprobs == want.logprobs, what


def over(cases: list[tuple[str, Cell]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "cell"), cases, ids=[f"{name}-{cell.name}" for name, cell in cases])


@over(CASES)
def test_texts_and_hits(name: str, cell: Cell, find_subject: Callable[[str], Subject]) -> None:
    """Cold, warm, and as the next turn of a chat, which hits up to the last boundary of the prompt before."""
    subject = find_subject(name)
    reference, chunk, size = subject.reference, subject.model.chunk_tokens, cell.block_tokens
    lengths = (1, chunk - 1, chunk, chunk + 1, 2 * chunk, 4 * chunk - 1, 4 * chunk + 2, 6 * chunk + 5)
    client = subject.open_engine(cell, "roomy")
    try:
        first, reply = subject.prompts(lengths), params(MAMBA2_CHUNK + 5)
        wanted = [reference.generate(prompt, reply) for prompt in first]
        cold = client.llm.generate(first, reply)
        check(cold, wanted)
        warm = client.llm.generate(first, reply)
        check(warm, wanted)
        assert [out.num_cached_tokens for out in warm] == [(n - 1) // size * size for n in lengths]
        turns = [prompt + want.token_ids + prompt[: chunk // 2 + 3] for prompt, want in zip(first, wanted, strict=True)]
        next_turn = client.llm.generate(turns, params(4))
        check(next_turn, [reference.generate(turn, params(4)) for turn in turns])
        assert [out.num_cached_tokens for out in next_turn] == [n // size * size for n in lengths]
    finally:
        client.llm.shutdown()


@over(TIGHT_CASES)
def test_preempted_replies_are_run_again_as_replies(
    name: str, cell: Cell, find_subject: Callable[[str], Subject]
) -> None:
    subject = find_subject(name)
    client = subject.open_engine(cell, "tight")
    try:
        half = cell.block_tokens // 2
        some, reply = subject.prompts((half, half + 9, 2 * half + 1, 7, half - 3)), params(2 * half + 8)
        wanted = [subject.reference.generate(prompt, reply) for prompt in some]
        for _ in range(2):
            check(client.llm.generate(some, reply), wanted)
        assert client.core.stats().num_preemptions_total > 0
    finally:
        client.llm.shutdown()


@pytest.mark.parametrize("name", [SHIPPED, *OTHERS, "qwen3_5", "qwen3_next"])
def test_the_switch_changes_bits_and_no_text(name: str, find_subject: Callable[[str], Subject]) -> None:
    """Else the tests above would compare nothing that the other setting does not show as well."""
    subject = find_subject(name)
    (prompt,) = subject.prompts((130,))
    by_chunk, by_token = (
        engine.generate(prompt, params(8)) for engine in (subject.reference, ReferenceEngine(subject.model))
    )
    assert by_chunk.token_ids == by_token.token_ids and by_chunk.logprobs != by_token.logprobs


def test_a_block_that_holds_no_whole_chunks_is_refused(find_subject: Callable[[str], Subject]) -> None:
    """The chunk is the family's: a block that another family takes is too small for this one."""
    with pytest.raises(ConfigError, match=f"--mamba-block-size {MAMBA2_CHUNK}.*multiple of {DELTA_CHUNK}"):
        LLM(str(find_subject("qwen3_5").path), device="cpu", mamba_block_size=MAMBA2_CHUNK, prefill_scan="chunked")
