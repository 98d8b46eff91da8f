"""Fixtures of the engine's tests; makes `fake_core` importable here and in the processes that tests start."""

import os
import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parent)
sys.path.insert(0, FOLDER)


@pytest.fixture(scope="session", autouse=True)
def children_find_the_fake_core() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [FOLDER, os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def fake_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with a chat template and no weights."""
    from fake_core import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
