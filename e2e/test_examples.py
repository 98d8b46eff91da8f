"""The examples run as they are, and say what they promise."""

import os
import subprocess
import sys
from pathlib import Path

from server_process import ServerProcess

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run_example(name: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_prefix_cache() -> None:
    with ServerProcess("--spec-tokens", "3", "--max-model-len", "1024") as server:
        lines = run_example("prefix_cache.py", OPENAI_BASE_URL=f"{server.url}/v1").splitlines()
    cold, warm, verdict = lines
    num_prompt = int(cold.split()[1])
    assert ", 0 of them cached" in cold
    assert f", {(num_prompt - 1) // 128 * 128} of them cached" in warm
    assert ", 0 of them drafts" not in warm
    assert verdict == "the texts are the same"


def test_offline() -> None:
    output = run_example("offline.py")
    assert output.count("# 40 tokens, ") == 2


def test_every_example_is_short_and_run_here() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"prefix_cache.py", "offline.py"}
    assert all(len((EXAMPLES / name).read_text().splitlines()) <= 35 for name in names)
