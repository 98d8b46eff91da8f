"""Grammars that cannot be compiled, or not in time, never reach the engine."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from tokenizers import Tokenizer

from mambalign.engine.checkpoint import DEFAULT_MODEL
from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.grammar_check import GrammarCheck
from mambalign.engine.server.grammar_process import Vocabulary
from mambalign.worker.sampling_params import StructuredOutputs

PATTERNS = [{"pattern": f"(a|b)*a(a|b){{{length}}}"} for length in range(24)]
ENDLESS = StructuredOutputs(json={"type": "string", "allOf": PATTERNS})
EASY = StructuredOutputs(regex="[ab]+")


@pytest.fixture
async def make_check() -> AsyncIterator[Callable[[float], GrammarCheck]]:
    made = []

    def make(seconds: float) -> GrammarCheck:
        tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
        made.append(GrammarCheck(Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), [0], seconds)))
        return made[-1]

    yield make
    for check in made:
        await check.close()


async def refusal(check: GrammarCheck, wanted: StructuredOutputs) -> tuple[int, str] | None:
    try:
        await check.check(wanted)
    except ApiError as error:
        assert error.param == "structured_outputs"
        return error.status, error.message
    return None


async def test_one_process_tries_them_all(make_check: Callable[[float], GrammarCheck]) -> None:
    check = make_check(60.0)
    assert await refusal(check, EASY) is None
    process = check._process
    status, text = await refusal(check, StructuredOutputs(regex="("))
    assert status == 400 and text.startswith("structured_outputs: the grammar cannot be used: ")
    status, text = await refusal(check, StructuredOutputs(json="[" * 100_000))
    assert status == 400 and "recursion" in text
    assert await refusal(check, StructuredOutputs(choice=["a\nb", "é"])) is None
    assert check._process is process and process.returncode is None


async def test_what_is_known_is_not_tried_again(make_check: Callable[[float], GrammarCheck]) -> None:
    check = make_check(60.0)
    assert await refusal(check, EASY) is None
    await check.close()
    assert await refusal(check, EASY) is None
    assert check._process is None


async def test_what_takes_for_ever_takes_its_process_along(make_check: Callable[[float], GrammarCheck]) -> None:
    check = make_check(1.0)
    too_long = (400, "structured_outputs: the grammar takes more than 1 s to compile: make it simpler")
    assert await refusal(check, ENDLESS) == too_long
    assert await refusal(check, EASY) is None, "the next one has a process of its own"


async def test_a_process_that_ends_is_told_of(make_check: Callable[[float], GrammarCheck]) -> None:
    check = make_check(60.0)
    assert await refusal(check, EASY) is None
    asked = asyncio.create_task(refusal(check, ENDLESS))
    await asyncio.sleep(0.2)
    check._process.kill()
    assert await asked == (400, "structured_outputs: the grammar cannot be used: its compiler ended with exit code -9")
    assert await refusal(check, StructuredOutputs(regex="c")) is None


async def test_others_wait_only_so_long(make_check: Callable[[float], GrammarCheck]) -> None:
    check = make_check(0.5)
    async with check._turn:
        assert await refusal(check, EASY) == (
            429,
            "structured_outputs: other grammars are being compiled: try again later",
        )
    assert await refusal(check, EASY) is None


async def test_the_answer_to_a_client_that_left_is_nobodys(make_check: Callable[[float], GrammarCheck]) -> None:
    check = make_check(60.0)
    assert await refusal(check, EASY) is None
    asked = asyncio.create_task(refusal(check, StructuredOutputs(regex="(")))
    await asyncio.sleep(0)
    while not check._turn.locked():
        await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await refusal(check, StructuredOutputs(regex="d")) is None
