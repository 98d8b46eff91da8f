"""Grammars that cannot be compiled, or not in time, never reach the engine."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from mambalign.engine.server.errors import ApiError
from mambalign.engine.server.grammar_check import NUM_AT_ONCE, GrammarCheck
from mambalign.worker.sampling_params import StructuredOutputs

ENDLESS = "endless"


class FakeCompiler:
    """Never gets done with the regex `endless` before it is let go."""

    def __init__(self) -> None:
        self.made: list[str | None] = []
        self.may_end = threading.Event()

    def make(self, wanted: StructuredOutputs) -> None:
        self.made.append(wanted.regex)
        if wanted.regex == ENDLESS:
            self.may_end.wait()
        if wanted.regex == "(":
            raise ValueError("structured_outputs: unclosed")
        if wanted.regex == "panic":
            raise BaseException("told to panic")


@pytest.fixture
def compiler() -> Iterator[FakeCompiler]:
    compiler = FakeCompiler()
    yield compiler
    compiler.may_end.set()


async def refusal(check: GrammarCheck, regex: str) -> tuple[int, str] | None:
    try:
        await check.check(StructuredOutputs(regex=regex))
    except ApiError as error:
        assert error.param == "structured_outputs"
        return error.status, error.message
    return None


async def test_each_is_compiled_once(compiler: FakeCompiler) -> None:
    check = GrammarCheck(compiler)
    assert [await refusal(check, regex) for regex in "aba"] == [None] * 3
    assert compiler.made == ["a", "b"]


async def test_what_cannot_be_compiled(compiler: FakeCompiler) -> None:
    check = GrammarCheck(compiler)
    assert await refusal(check, "(") == (400, "structured_outputs: unclosed")
    assert await refusal(check, "panic") == (400, "structured_outputs: the grammar cannot be used: told to panic")
    assert await refusal(check, "a") is None


async def test_what_takes_for_ever(compiler: FakeCompiler) -> None:
    check = GrammarCheck(compiler, seconds=0.05)
    endless = [asyncio.create_task(refusal(check, ENDLESS)) for _ in range(NUM_AT_ONCE)]
    assert (
        await asyncio.gather(*endless)
        == [(400, "structured_outputs: the grammar takes more than 0.05 s to compile: make it simpler")] * NUM_AT_ONCE
    )
    busy = (429, "structured_outputs: other grammars are being compiled: try again later")
    assert await refusal(check, "a") == busy and "a" not in compiler.made
    compiler.may_end.set()
    while await refusal(check, "a") == busy:
        pass
    assert compiler.made[-1] == "a", "places are given back"
