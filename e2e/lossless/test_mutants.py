"""Three planted faults are found; `scripts/mutate.py` plants them all. MUTANTS.md has the last outcome."""

from pathlib import Path

import pytest
from lossless.mutants import MUTANTS, Mutant
from lossless.mutation import ROOT, run_mutants

ALWAYS = ("token bias one short on V2", "num_accepted of another request after compaction", "salt left out of the hash")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_to_replace_is_there(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text().count(mutant.old) == mutant.count


def test_the_table_has_them_all() -> None:
    table = (Path(__file__).parent / "MUTANTS.md").read_text()
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[7:]] == [m.name for m in MUTANTS]
    assert "NOT FOUND" not in table


def test_three_are_found() -> None:
    outcomes = list(run_mutants([mutant for mutant in MUTANTS if mutant.name in ALWAYS]))
    assert [outcome.mutant.name for outcome in outcomes if outcome.is_found] == list(ALWAYS)
