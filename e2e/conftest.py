"""Fixtures of the end-to-end tests: the session's oracle, and what it counted."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine" / "tests"))  # for `server_process`
sys.path.insert(0, str(Path(__file__).parent))

from cells import default_path
from oracle import Oracle, Tally

TALLY = "e2e_tally"  # its key among what a process of pytest-xdist hands to the one that reports

_tallies: list[Tally] = []


@pytest.fixture(scope="session")
def oracle(pytestconfig: pytest.Config) -> Iterator[Oracle]:
    oracle = Oracle(default_path())
    yield oracle
    if hasattr(pytestconfig, "workeroutput"):
        pytestconfig.workeroutput[TALLY] = asdict(oracle.tally)
    else:
        _tallies.append(oracle.tally)
    assert not oracle.tally.too_many_ties, f"too many ties: {oracle.tally.describe()}"


@pytest.fixture(scope="session")
def is_thorough(pytestconfig: pytest.Config) -> bool:
    """Long versions of the scenarios: with --all."""
    return pytestconfig.getoption("--all")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended."""
    if tally := getattr(node, "workeroutput", {}).get(TALLY):
        _tallies.append(Tally(**tally))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for tally in _tallies:
        terminalreporter.write_line(f"e2e: {tally.describe()}")
