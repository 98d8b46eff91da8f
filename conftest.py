"""Test-wide settings: one thread a process (servers that tests start share the cores), and `--all` for slow cells."""

import gc
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked slow too: every cell of the suites")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: a cell that only --all runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist: the longest files first, so that its processes end together
        items.sort(key=lambda item: not item.nodeid.startswith("e2e/"))
    if config.getoption("--all"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: runs with --all"))


def pytest_collection_finish() -> None:
    """An engine refers to itself: many tests make the collector look for one, and need not have it walk all that was
    imported (a quarter of a second each time).
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what is collected at the very end may be told of as a leak
