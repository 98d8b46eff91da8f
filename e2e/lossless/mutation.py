"""Plants one fault in a copy of the source tree and runs the proof on the copy. The tree itself is never written to."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lossless.mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "worker", "kernels")
OTHERS = ("e2e", "scripts", "conftest.py", "pyproject.toml")
QUICK_PROFILE = ("scripts/prove.py", "--quick", "--shrink-seconds", "0")
MOST_SECONDS = 1800.0
FOUND = re.compile(r"^(?:seed \d+: |FAILED ).*$", re.MULTILINE)  # how the proof, or pytest, says so


@dataclass(frozen=True)
class Outcome:
    """`found_by`: the line that tells the difference; None when nothing did."""

    mutant: Mutant
    found_by: str | None
    seconds: float
    output_tail: str

    @property
    def is_found(self) -> bool:
        return self.found_by is not None

    def line(self) -> str:
        what = self.found_by or f"NOT FOUND\n{self.output_tail}"
        return f"{self.mutant.name} ({self.seconds:.0f} s): {what}"

    def row(self) -> str:
        """Of the table."""
        found_by = (self.found_by or "NOT FOUND").replace("|", "/")
        found_by = found_by if len(found_by) <= 110 else found_by[:107] + "..."
        how = ", interpreted kernels" if self.mutant.environment else ""
        return f"| {self.mutant.name} | `{self.mutant.path}`{how} | {found_by} | {self.seconds:.0f} |"


class MutantFolder:
    """A copy of the tree for one fault after the other; one place, so that what numba compiles serves all of them."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in (*PACKAGES, *OTHERS):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, folder / name)
        self._installed = folder / "installed"
        (self._installed / "mambalign").mkdir(parents=True)
        for name in PACKAGES:
            (self._installed / "mambalign" / name).symlink_to(folder / name)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The copy with the fault. Raises ValueError when the text to replace is not there."""
        source = (ROOT / mutant.path).read_text()
        if (count := source.count(mutant.old)) != mutant.count:
            raise ValueError(f"{mutant.name}: {mutant.path} holds the text {count} times, not {mutant.count}")
        (self.folder / mutant.path).write_text(source.replace(mutant.old, mutant.new))
        try:
            yield
        finally:
            shutil.copy2(ROOT / mutant.path, self.folder / mutant.path)

    def run(self, mutant: Mutant) -> Outcome:
        """Plant the fault and run what must find it. Raises RuntimeError when that cannot even start."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._installed),
            "PYTHONDONTWRITEBYTECODE": "1",  # a file that changes twice within a second looks the same
            "NUMBA_CACHE_DIR": str(self.folder / "compiled"),
            "OMP_NUM_THREADS": "1",
        }
        start = time.monotonic()
        with self.planted(mutant):
            done = subprocess.run(
                [sys.executable, *(mutant.command or QUICK_PROFILE)],
                cwd=self.folder,
                env=environment | mutant.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=MOST_SECONDS,
            )
        seconds, tail = time.monotonic() - start, done.stdout[-3000:]
        said = [line for line in FOUND.findall(done.stdout) if not line.endswith("no difference")]
        if done.returncode < 0:
            said.append(f"the process died of signal {-done.returncode}")
        if done.returncode and not said:
            raise RuntimeError(f"{mutant.name}: nothing was proved\n{tail}")
        return Outcome(mutant, said[0] if done.returncode else None, seconds, tail)


def run_mutants(mutants: Iterable[Mutant]) -> Iterator[Outcome]:
    """One after the other, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mambalign-mutants-") as name:
        folder = MutantFolder(Path(name))
        for mutant in mutants:
            yield folder.run(mutant)
