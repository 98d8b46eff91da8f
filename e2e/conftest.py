"""Fixtures of the end-to-end tests: the session's oracle, what it counted, and server cells in the background."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine" / "tests"))  # for `server_process`
sys.path.insert(0, str(Path(__file__).parent))

from cells import Cell, default_path, server_cells
from http_client import open_server
from oracle import Oracle
from scenarios import ROOMY_SCENARIOS, TIGHT_SCENARIOS, Suite, assert_paths_ran

NUM_SERVER_CELLS_AT_ONCE = 2

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


@pytest.fixture(scope="session", autouse=True)
def server_plays(
    request: pytest.FixtureRequest, oracle: Oracle, is_thorough: bool
) -> Iterator[dict[Cell, Future[None]]]:
    """The server cells that this session's tests will ask for, on their way."""
    items = [item for item in request.session.items if "server_cell" in getattr(item, "fixturenames", ())]
    cells = [item.callspec.params["server_cell"] for item in items if item.get_closest_marker("skip") is None]
    with ThreadPoolExecutor(NUM_SERVER_CELLS_AT_ONCE) as executor:
        yield {cell: executor.submit(play_on_server, cell, oracle, is_thorough) for cell in cells}
        executor.shutdown(cancel_futures=True)


def play_on_server(cell: Cell, oracle: Oracle, is_thorough: bool) -> None:
    suite = Suite(cell, oracle, open_server, is_thorough)
    with_tight_pools = is_thorough or server_cells().index(cell) % 4 in (0, 3)
    try:
        for scenario in (*ROOMY_SCENARIOS, *(TIGHT_SCENARIOS if with_tight_pools else ())):
            suite.play(scenario)
        assert_paths_ran(suite)
    finally:
        suite.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and any(oracle.tally.too_many_ties for oracle in _oracles):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for oracle in _oracles:
        verdict = ": TOO MANY TIES" if oracle.tally.too_many_ties else ""
        terminalreporter.write_line(f"e2e: {oracle.tally.describe()}{verdict}")
