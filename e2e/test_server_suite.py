"""The prefix-cache suite through a real server and the openai client: a pairwise cover of the matrix, all with --all.

Clients alternate between sync and async, whole answers and streams. Every other cell has a second server, with pools
so small that requests push each other out.
"""

from collections.abc import Iterator

import pytest
from cells import NUM_SERVER_CELLS, Cell, cell_params, server_cells
from http_client import HttpClient
from oracle import Oracle
from scenarios import ROOMY_SCENARIOS, TIGHT_SCENARIOS, Suite, assert_paths_ran

MODES = ("sync", "async-stream", "async", "sync-stream")


def open_server(cell: Cell, pools: str) -> HttpClient:
    mode = MODES[server_cells().index(cell) % len(MODES)]
    return HttpClient(cell.arguments(cell.pools(pools)), mode)


@pytest.fixture(params=cell_params(server_cells(), NUM_SERVER_CELLS))
def suite(request: pytest.FixtureRequest, oracle: Oracle, is_thorough: bool) -> Iterator[Suite]:
    suite = Suite(request.param, oracle, open_server, is_thorough)
    try:
        yield suite
    finally:
        suite.close()


def test_server(suite: Suite, is_thorough: bool) -> None:
    for scenario in ROOMY_SCENARIOS:
        suite.play(scenario)
    if is_thorough or server_cells().index(suite.cell) % 4 in (0, 3):
        for scenario in TIGHT_SCENARIOS:
            suite.play(scenario)
    assert_paths_ran(suite)
