"""The prefix-cache suite through a real server and the openai client: a pairwise cover of the matrix, all with --all.

Clients alternate between sync and async, whole answers and streams. Half of the cells have a second server, with pools
so small that requests push each other out.
"""

import pytest
from cells import NUM_SERVER_CELLS, Cell, cell_params, server_cells
from http_client import open_server
from oracle import Oracle
from scenarios import ROOMY_SCENARIOS, TIGHT_SCENARIOS, Suite, assert_paths_ran


@pytest.mark.parametrize("cell", cell_params(server_cells(), NUM_SERVER_CELLS))
def test_server(cell: Cell, oracle: Oracle, is_thorough: bool) -> None:
    suite = Suite(cell, oracle, open_server, is_thorough)
    with_tight_pools = is_thorough or server_cells().index(cell) % 4 in (0, 3)
    try:
        for scenario in (*ROOMY_SCENARIOS, *(TIGHT_SCENARIOS if with_tight_pools else ())):
            suite.play(scenario)
        assert_paths_ran(suite)
    finally:
        suite.close()
