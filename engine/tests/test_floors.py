"""Imports go one way: scripts, examples, e2e -> engine -> worker -> kernels; and torch stays where it belongs."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {"kernels": {"kernels"}, "worker": {"kernels", "worker"}, "engine": {"kernels", "worker", "engine"}}
# Modules of the engine that may import torch; the rest start fast, or are pure logic.
WITH_TORCH = {"engine/core.py", "engine/engine_plan.py", "engine/reference.py"}


def sources(folder: str) -> list[Path]:
    return [p for p in sorted((ROOT / folder).rglob("*.py")) if "tests" not in p.parts]


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.mark.parametrize("folder", FLOORS)
def test_a_floor_imports_only_floors_below_it(folder: str) -> None:
    assert sources(folder)
    for path in sources(folder):
        for name in imports(path):
            if name.split(".")[0] == "mambalign":
                assert name.split(".")[1] in FLOORS[folder], f"{path} imports {name}"


def test_kernels_import_torch_and_triton_only() -> None:
    """And those for a CPU numba, which no machine with a GPU needs to have."""
    allowed = {"torch", "triton", "mambalign"} | sys.stdlib_module_names
    for path in sources("kernels"):
        for_cpu = {"llvmlite", "numba", "numpy"} if path.parent.name == "cpu" else set()
        assert {name.split(".")[0] for name in imports(path)} <= allowed | for_cpu, path


def test_the_engine_imports_torch_in_few_places() -> None:
    for path in sources("engine"):
        if str(path.relative_to(ROOT)) not in WITH_TORCH:
            assert "torch" not in {name.split(".")[0] for name in imports(path)}, path
