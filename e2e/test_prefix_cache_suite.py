"""The prefix-cache suite in process: every scenario in every cell of the matrix, then whether the cell's paths ran."""

from collections.abc import Callable, Iterator

import pytest
from cells import NUM_LOCAL_CELLS, Cell, cell_params, local_cells
from local_client import LocalClient
from oracle import Oracle
from scenarios import SCENARIOS, Suite, assert_paths_ran


def open_local(cell: Cell, pools: str) -> LocalClient:
    return LocalClient(**cell.options(cell.pools(pools)))


@pytest.fixture(scope="module", params=cell_params(local_cells(), NUM_LOCAL_CELLS))
def suite(request: pytest.FixtureRequest, oracle: Oracle, is_thorough: bool) -> Iterator[Suite]:
    suite = Suite(request.param, oracle, open_local, is_thorough)
    yield suite
    suite.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario(suite: Suite, scenario: Callable[[Suite], None]) -> None:
    suite.play(scenario)


def test_paths_ran(suite: Suite) -> None:
    if len(suite.ran) < len(SCENARIOS):
        pytest.skip("needs every scenario of the cell")
    assert_paths_ran(suite)
