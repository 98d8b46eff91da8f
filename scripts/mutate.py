#!/usr/bin/env python3
"""Does the proof find faults? Plants those of e2e/lossless/mutants.py, one at a time, in a copy, and proves the copy.

    python scripts/mutate.py                  all of them
    python scripts/mutate.py salt junction    those whose names contain one of these words
    python scripts/mutate.py --write          all, and the table into e2e/lossless/MUTANTS.md

A mutant stops at its first difference. Exit code 1 when one is not found, or when the text to replace is gone.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))

from lossless.mutants import MUTANTS
from lossless.mutation import Outcome, run_mutants

TABLE = Path(__file__).resolve().parent.parent / "e2e" / "lossless" / "MUTANTS.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    args = parser.parse_args()
    if args.words and args.write:
        parser.error("--write needs the whole list")
    chosen = [m for m in MUTANTS if not args.words or any(word in m.name for word in args.words)]
    outcomes = []
    for outcome in run_mutants(chosen):
        outcomes.append(outcome)
        print(outcome.line(), flush=True)
    num_found = sum(outcome.is_found for outcome in outcomes)
    print(f"{num_found} of {len(outcomes)} found")
    if args.write:
        TABLE.write_text(table(outcomes))
    return 0 if outcomes and num_found == len(outcomes) else 1


def table(outcomes: list[Outcome]) -> str:
    lines = [
        "# Faults planted in the engine, and what found them",
        "",
        "Made by `python scripts/mutate.py --write`; each fault is a replacement in `mutants.py`, and is proved by",
        "`scripts/prove.py --quick` unless said otherwise. Seconds on one CPU core, start-up included.",
        "",
        "| fault | where | found by | seconds |",
        "|---|---|---|---|",
    ]
    lines += [outcome.row() for outcome in outcomes]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
