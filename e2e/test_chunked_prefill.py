"""Prompts scanned by chunks: every text is the reference engine's, which scans the prompt by chunks and the reply not.

The switch changes bits (a test says so), so it has a reference of its own; transformers judges the other setting.
"""

import random

import pytest
from cells import Cell, default_model
from local_client import LocalClient

from mambalign.engine import SamplingParams
from mambalign.engine.llm import RequestOutput
from mambalign.engine.reference import Generation, ReferenceEngine
from mambalign.kernels.mamba2_chunk_shape import CHUNK

BLOCK = 2 * CHUNK
CELLS = [  # B, KV block, budget, rows
    Cell("v1", "SD", 3, "mtp", BLOCK, 16, CHUNK + 9, 6),
    Cell("v2", "DS", 3, "ngram", BLOCK, 8, 2 * CHUNK + 7, 8),
    Cell("v2", "SD", 7, "mtp", CHUNK, 16, 2048, 8),
    Cell("v1", "DS", 0, "mtp", CHUNK, 16, CHUNK + 3, 4),
]
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK + 2, 3 * BLOCK + 5)


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=2)


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(300) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def reference() -> ReferenceEngine:
    return ReferenceEngine(default_model(), by_chunk=True)


def open_engine(cell: Cell, pools: str) -> LocalClient:
    return LocalClient(**cell.options(cell.pools(pools)), prefill_scan="chunked")


def check(outputs: list[RequestOutput], wanted: list[Generation]) -> None:
    for output, want in zip(outputs, wanted, strict=True):
        what = f"prompt of {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} cached"
        assert output.outputs[0].token_ids == want.token_ids, what
        assert output.outputs[0].logprobs == want.logprobs, what


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_texts_and_hits(cell: Cell, reference: ReferenceEngine) -> None:
    """Cold, warm, and as the next turn of a chat, which hits up to the last boundary of the prompt before."""
    client = open_engine(cell, "roomy")
    try:
        first, reply, size = prompts(LENGTHS), params(CHUNK + 5), cell.block_tokens
        wanted = [reference.generate(prompt, reply) for prompt in first]
        cold = client.llm.generate(first, reply)
        check(cold, wanted)
        warm = client.llm.generate(first, reply)
        check(warm, wanted)
        assert [out.num_cached_tokens for out in warm] == [(n - 1) // size * size for n in LENGTHS]
        turns = [prompt + want.token_ids + prompt[: CHUNK + 3] for prompt, want in zip(first, wanted, strict=True)]
        next_turn = client.llm.generate(turns, params(4))
        check(next_turn, [reference.generate(turn, params(4)) for turn in turns])
        assert [out.num_cached_tokens for out in next_turn] == [n // size * size for n in LENGTHS]
    finally:
        client.llm.shutdown()


@pytest.mark.parametrize("cell", CELLS[:2], ids=lambda cell: cell.name)
def test_preempted_replies_are_run_again_as_replies(cell: Cell, reference: ReferenceEngine) -> None:
    client = open_engine(cell, "tight")
    try:
        some, reply = prompts((CHUNK, CHUNK + 9, BLOCK + 1, 7, CHUNK - 3)), params(BLOCK + 8)
        wanted = [reference.generate(prompt, reply) for prompt in some]
        for _ in range(2):
            check(client.llm.generate(some, reply), wanted)
        assert client.core.stats().num_preemptions_total > 0
    finally:
        client.llm.shutdown()


def test_the_switch_changes_bits_and_no_text(reference: ReferenceEngine) -> None:
    """Else the tests above would compare nothing that the other setting does not show as well."""
    (prompt,) = prompts((2 * BLOCK + 2,))
    by_chunk, by_token = (
        engine.generate(prompt, params(8)) for engine in (reference, ReferenceEngine(default_model()))
    )
    assert by_chunk.token_ids == by_token.token_ids and by_chunk.logprobs != by_token.logprobs
