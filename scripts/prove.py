#!/usr/bin/env python3
"""Random traffic on random engines, each text and all of memory compared with the reference engine's, bit for bit.

    python scripts/prove.py --minutes 10           what comes, from seed 0 on
    python scripts/prove.py --quick                the seeds that CI plays
    python scripts/prove.py --seed 17              one of them again
    python scripts/prove.py --replay '{"setup":..' a plan

Ends with a table of what was gone through and one JSON line; exit code 1 when something differs: then it is made
small first and printed as a test. See e2e/lossless/.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engine" / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))

from lossless.plan import Plan
from lossless.play import play
from lossless.prover import QUICK_SEEDS, SHRINK_SECONDS, DifferenceFound, prove
from lossless.tally import Tally

SAY_EVERY_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--minutes", type=float, help="play seeds for so long")
    what.add_argument("--quick", action="store_true", help="play the seeds of CI")
    what.add_argument("--seed", type=int, help="play the plan of this seed")
    what.add_argument("--replay", metavar="JSON", help="play this plan")
    parser.add_argument("--first-seed", type=int, default=0, help="of --minutes")
    parser.add_argument("--shrink-seconds", type=float, default=SHRINK_SECONDS, help="0: print what differs as it is")
    args = parser.parse_args()
    tally, start = Tally(), time.monotonic()
    try:
        if args.replay is not None:
            tally.add(play(Plan.from_json(args.replay)))
        else:
            prove(seeds_of(args, start, tally), tally, lambda line: print(line, flush=True), args.shrink_seconds)
    except DifferenceFound as difference:
        print(difference)
    numbers = {**tally.numbers(), "seconds": round(time.monotonic() - start)}
    print(f"\n{tally.table()}\n{json.dumps(numbers)}", flush=True)
    is_whole = args.quick or args.minutes is not None
    return 1 if tally.mismatches or (is_whole and tally.gaps()) else 0


def seeds_of(args: argparse.Namespace, start: float, tally: Tally) -> Iterator[int]:
    """The seeds to play, with a line about them now and then."""
    if args.seed is not None:
        print(f"seed {args.seed}", flush=True)
        yield args.seed
        return
    said = start
    for seed in QUICK_SEEDS if args.quick else count(args.first_seed):
        now = time.monotonic()
        if args.minutes is not None and now - start > 60 * args.minutes:
            return
        if now - said > SAY_EVERY_SECONDS:
            said = now
            print(f"seed {seed}: {tally.requests:,} requests, {tally.steps:,} steps, no difference", flush=True)
        yield seed


if __name__ == "__main__":
    sys.exit(main())
