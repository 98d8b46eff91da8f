"""Fixtures of the end-to-end tests: the oracle of the session, and what it counted, printed at the end."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cells import default_path
from oracle import Oracle

_oracles: list[Oracle] = []


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    if not _oracles:
        _oracles.append(Oracle(default_path()))
    return _oracles[0]


@pytest.fixture(scope="session")
def is_thorough(pytestconfig: pytest.Config) -> bool:
    """Long versions of the scenarios: with --all."""
    return pytestconfig.getoption("--all")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and any(oracle.tally.too_many_ties for oracle in _oracles):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for oracle in _oracles:
        verdict = ": TOO MANY TIES" if oracle.tally.too_many_ties else ""
        terminalreporter.write_line(f"e2e: {oracle.tally.describe()}{verdict}")
