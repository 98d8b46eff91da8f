"""The examples run as they are, and say what they promise."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    options = ("--max-model-len", "1024", "--cache-memory", "64MiB", "--chat-template", EXAMPLES / "tools.jinja")
    with ServerProcess("--spec-tokens", "3", *options) as server:
        yield server


def run_example(name: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask_example(name: str, server: ServerProcess) -> str:
    return run_example(name, OPENAI_BASE_URL=f"{server.url}/v1")


def test_openai_sync(server: ServerProcess) -> None:
    text, _, last = ask_example("openai_sync.py", server).rstrip().rpartition("\n")
    assert text.strip() and last == "# default: 60 tokens, ended by length"


def test_openai_async(server: ServerProcess) -> None:
    output = ask_example("openai_async.py", server)
    assert len(re.findall(r"^def \w+\(", output, re.MULTILINE)) >= 6
    assert output.rstrip().endswith("# 6 at once; the first again, alone, is the same")


def test_streaming(server: ServerProcess) -> None:
    match = re.search(r"\n# 60 tokens in (\d+) pieces\n$", ask_example("streaming.py", server))
    assert 60 / 4 <= int(match[1]) < 60, "at most 4 tokens a step, and some drafts were accepted"


def test_structured_output(server: ServerProcess) -> None:
    as_json, choice, by_regex = ask_example("structured_output.py", server).splitlines()
    value = ast.literal_eval(as_json.removeprefix("json: "))
    assert list(value) == ["language", "name", "num_lines"]
    assert value["language"] in ("Python", "C", "Rust") and len(value["name"]) <= 20 and 1 <= value["num_lines"] <= 99
    assert choice in ("choice: short", "choice: long")
    assert re.fullmatch(r"regex: def [a-z_]{3,12}\(\):", by_regex)


def test_tools(server: ServerProcess) -> None:
    call, _, text = ask_example("tools.py", server).partition("\n")
    match = re.fullmatch(r"add\((-?\d+), (-?\d+)\) = (-?\d+), ended by tool_calls", call)
    assert int(match[1]) + int(match[2]) == int(match[3])
    assert text.strip(), "the second answer, after the tool's"


def test_prefix_cache(server: ServerProcess) -> None:
    cold, warm, verdict = ask_example("prefix_cache.py", server).splitlines()
    num_prompt = int(cold.split()[1])
    assert ", 0 of them cached" in cold
    assert f", {(num_prompt - 1) // 128 * 128} of them cached" in warm
    assert ", 0 of them drafts" not in warm
    assert verdict == "the texts are the same"


def test_offline_batch() -> None:
    output = run_example("offline_batch.py")
    assert output.count("# 40 tokens, ") == 3 and "# 40 tokens, 0 of" not in output
    assert output.startswith("def read_lines(path):\n")


def test_offline_chat() -> None:
    output = run_example("offline_chat.py")
    texts = re.split(r"^--- .*\n", output, flags=re.MULTILINE)[1:4]
    assert len({text.strip() for text in texts} - {""}) == 3, "three choices that differ"
    cached, num_prompt = map(int, re.search(r"--- (\d+) of (\d+) prompt tokens were cached\n$", output).groups())
    assert cached > 0 and cached % 32 == 0 and cached < num_prompt


def test_every_example_is_short_and_run_here() -> None:
    tests = {name.removeprefix("test_") + ".py" for name in globals() if name.startswith("test_")}
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names and names <= tests
    assert all(len(path.read_text().splitlines()) <= 35 for path in EXAMPLES.iterdir())
