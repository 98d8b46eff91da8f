"""The prefix-cache suite through a real server and the openai client: a pairwise cover of the matrix, all with --all.

Clients alternate between sync and async, whole answers and streams. Half of the cells have a second server, with pools
so small that requests push each other out. The cells run in the background from the session's start (`conftest.py`):
this process and a server have a core each.
"""

from concurrent.futures import Future

import pytest
from cells import NUM_SERVER_CELLS, Cell, cell_params, server_cells


@pytest.mark.parametrize("server_cell", cell_params(server_cells(), NUM_SERVER_CELLS))
def test_server(server_cell: Cell, server_plays: dict[Cell, Future[None]]) -> None:
    server_plays[server_cell].result()
