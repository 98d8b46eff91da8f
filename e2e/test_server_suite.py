"""The prefix-cache suite through a real server and the openai client: a pairwise cover of the matrix, all with --all.

Clients alternate between sync and async, whole answers and streams. Half of the cells have a second server, with pools
so small that requests push each other out. Two cells run at a time: a server leaves its client's core idle.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from cells import NUM_SERVER_CELLS, Cell, cell_params, server_cells
from http_client import HttpClient
from oracle import Oracle
from scenarios import ROOMY_SCENARIOS, TIGHT_SCENARIOS, Suite, assert_paths_ran

MODES = ("sync", "async-stream", "async", "sync-stream")
NUM_AT_ONCE = 2


def open_server(cell: Cell, pools: str) -> HttpClient:
    mode = MODES[server_cells().index(cell) % len(MODES)]
    return HttpClient(cell.arguments(cell.pools(pools)), mode)


def play_cell(cell: Cell, oracle: Oracle, is_thorough: bool) -> None:
    suite = Suite(cell, oracle, open_server, is_thorough)
    scenarios = list(ROOMY_SCENARIOS)
    if is_thorough or server_cells().index(cell) % 4 in (0, 3):
        scenarios += TIGHT_SCENARIOS
    try:
        for scenario in scenarios:
            suite.play(scenario)
        assert_paths_ran(suite)
    finally:
        suite.close()


@pytest.fixture(scope="module")
def plays(request: pytest.FixtureRequest, oracle: Oracle, is_thorough: bool) -> Iterator[dict[Cell, Future[None]]]:
    """Every cell that this session is to run, on its way."""
    items = [item for item in request.session.items if item.originalname == "test_server"]
    cells = [item.callspec.params["cell"] for item in items if not list(item.iter_markers("skip"))]
    executor = ThreadPoolExecutor(NUM_AT_ONCE)
    yield {cell: executor.submit(play_cell, cell, oracle, is_thorough) for cell in cells}
    executor.shutdown(cancel_futures=True)


@pytest.mark.parametrize("cell", cell_params(server_cells(), NUM_SERVER_CELLS))
def test_server(cell: Cell, plays: dict[Cell, Future[None]]) -> None:
    plays[cell].result()
