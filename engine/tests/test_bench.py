"""`mambalign bench`: its arithmetic, its traffic, and its passes over this server and over one that is not ours."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fake_core import make_checkpoint
from server_process import ServerProcess

from mambalign.engine.bench import bench_main, measure, parse
from mambalign.engine.bench_figures import Sample, figures_of, percentile, spread
from mambalign.engine.bench_plot import tokens_over_time
from mambalign.engine.bench_traffic import draw_requests, draw_talks
from mambalign.engine.cli import main

SPEC_TOKENS = 1


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", max_len=4096)
    with ServerProcess(folder, "--spec-tokens", str(SPEC_TOKENS), program="fake_core.py") as server:
        yield server.url


def usage(prompt: int, cached: int, completion: int, accepted: int, rejected: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected},
    }


def test_figures_of_known_times() -> None:
    samples = [
        Sample(10.0, [10.5, 10.75, 11.75], usage=usage(100, 50, 11, 6, 2)),
        Sample(10.25, [11.25], usage=usage(100, 100, 1, 0, 0)),
        Sample(11.0, [11.5, 12.0], usage=usage(200, 0, 3, 0, 4)),
        Sample(11.0, error="refused"),
    ]
    assert figures_of(samples) == {
        "output_tokens_per_s": 15 / 2.0,
        "requests_per_s": 3 / 2.0,
        "ttft_p50_ms": 500.0,
        "ttft_p99_ms": 1000.0,
        "gap_p50_ms": 500.0,
        "gap_p99_ms": 1000.0,
        "token_p50_ms": 125.0,
        "hit_rate": 150 / 400,
        "acceptance": 6 / 12,
    }
    silent = figures_of([Sample(0.0, [1.0, 2.0], usage={"prompt_tokens": 5, "completion_tokens": 2})])
    assert silent["hit_rate"] is None and silent["acceptance"] is None and silent["output_tokens_per_s"] == 1.0
    assert set(figures_of([Sample(0.0, error="refused")]).values()) == {None}
    assert spread([figures_of(samples), silent])["output_tokens_per_s"] == {"median": 4.2, "min": 1.0, "max": 7.5}
    assert "hit_rate" not in spread([silent])


def test_percentile_and_tokens_over_time() -> None:
    assert [percentile([4, 1, 3, 2], p) for p in (1, 25, 26, 50, 99, 100)] == [1, 1, 2, 2, 4, 4]
    times, rates = tokens_over_time([Sample(0.0, [1.0, 4.0], usage=usage(1, 0, 6, 0, 0))])
    assert sum(rates) * (times[1] - times[0]) == pytest.approx(6) and rates[-1] > 0


def test_traffic_is_drawn_from_its_seed() -> None:
    def draw(seed: int) -> list:
        lengths = {"message_tokens": 80, "long_tokens": 999, "reply_tokens": 40}
        return draw_talks(random.Random(seed), 20, 3, rate=4.0, **lengths)

    talks = draw(1)
    assert talks == draw(1) != draw(2)
    assert [i for i, talk in enumerate(talks) if talk.turns[0].message_tokens == 999] == [3, 11, 19]
    assert all(10 <= turn.message_tokens <= 80 for talk in talks for turn in talk.turns[1:])
    assert all(10 <= turn.reply_tokens <= 40 and turn.pause > 0 for talk in talks for turn in talk.turns)
    starts = [talk.starts_at for talk in talks]
    assert starts == sorted(starts) and len(set(starts)) == 20
    assert {talk.starts_at for talk in draw_requests(random.Random(1), 5, None, 8, 9)} == {0.0}


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """The JSON of a run, and all that it printed."""
    assert main(["bench", *arguments]) == code
    printed = capsys.readouterr().out
    return json.loads(printed.splitlines()[-1]), printed


def test_cold_and_warm_passes(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    load = ("--requests", "6", "--concurrency", "3", "--prompt-tokens", "99", "--output-tokens", "8")
    result, printed = run(capsys, "--url", url, *load, "--warm", "--repeats", "2", "--plot", str(picture))
    assert (result["requests"], result["failed"], result["model"]) == (24, 0, "tiny")
    assert result["prompt_tokens_mean"] == 99.0 and result["output_tokens_mean"] == 8.0
    assert result["cold"]["hit_rate"] == {"median": 0.0, "min": 0.0, "max": 0.0}, "no prompt was known"
    assert result["warm"]["hit_rate"]["median"] == round(98 / 99, 4), "the fake engine caches all but the last token"
    assert result["cold"]["acceptance"]["median"] == round(7 / 8, 4)
    assert result["cold"]["output_tokens_per_s"]["min"] > 0
    assert "prompt tokens cached, share" in printed and "first token, p99, ms" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_script_is_a_door_to_it(url: str) -> None:
    script = Path(__file__).parents[2] / "scripts" / "bench_serving.py"
    load = ("--requests", "1", "--prompt-tokens", "9", "--output-tokens", "4", "--repeats", "1")
    done = subprocess.run([sys.executable, script, f"--url={url}", *load], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["output_tokens_mean"] == 4.0


def test_conversations_at_poisson_moments(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--users", "4", "--turns", "2", "--rate", "50", "--shared-prefix-tokens", "200")
    sizes = ("--prompt-tokens", "40", "--output-tokens", "8", "--long-prompt-tokens", "300", "--seed", "5")
    result, _ = run(capsys, "--url", url, *load, *sizes, "--repeats", "1")
    assert (result["requests"], result["failed"]) == (8, 0)
    # Three users' two turns of 200 + 5..40 and on, and one user's of 200 + 300 and on.
    assert 8 * 205 + 2 * 260 < 8 * result["prompt_tokens_mean"] < 6 * 240 + 2 * 500 + 4 * 48
    _, again = run(capsys, "--url", url, *load, *sizes, "--repeats", "1")
    assert json.loads(again.splitlines()[-1])["prompt_tokens_mean"] == result["prompt_tokens_mean"]


def test_failed_requests_are_counted(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--requests", "2", "--prompt-tokens", "5000", "--repeats", "1")
    result, printed = run(capsys, "--url", url, *load, code=1)
    assert result["failed"] == 2 and "2 of 2 requests failed; the first: prompt" in printed


def test_a_server_that_cannot_be_measured(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main(["--url", url, "--model", "other"]) == 1
    assert "model 'other' is not served here" in capsys.readouterr().err
    assert bench_main(["--url", "http://127.0.0.1:9"]) == 1
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--requests", "0"), "must be at least 1, got 0"),
        (("--rate", "-1"), "must be more than 0"),
        (("--rate", "inf"), "must be a finite number, got inf"),
        (("--temperature", "nan"), "must be a finite number, got nan"),
        (("--plot", "picture.txt"), "must end in .png"),
        (("--plot", "/no/such/folder/x.png"), "no such folder"),
        (("--usres", "3"), "unrecognized arguments"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        bench_main(arguments)
    error = capsys.readouterr().err
    assert left.value.code == 2 and words in error and error.count("\n") == 1


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what an import of it then raises ImportError for
    with pytest.raises(SystemExit):
        bench_main(["--plot", "x.png"])
    assert "pip install matplotlib" in capsys.readouterr().err


@asynccontextmanager
async def other_server(asked: list[dict[str, Any]]) -> AsyncIterator[str]:
    """OpenAI's protocol and no more: no /tokenize, no ignore_eos, no details of usage; 5 characters a token."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "ignore_eos" in body:
            return web.json_response({"error": {"message": "unknown field ignore_eos"}}, status=400)
        asked.append(body)
        usage = {"prompt_tokens": len(body["prompt"]) // 5, "completion_tokens": 2}
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": "a"}], "usage": usage})
        response = web.StreamResponse()
        await response.prepare(request)
        for event in ({"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, {"choices": [], "usage": usage}):
            await response.write(b"data: %b\n\n" % json.dumps(event).encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "theirs"}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    async with TestServer(app) as server:
        yield str(server.make_url("/v1"))


def test_a_server_of_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[dict[str, Any]] = []

    async def bench() -> int:
        async with other_server(asked) as url:
            load = ("--requests", "3", "--prompt-tokens", "40", "--shared-prefix-tokens", "60", "--repeats", "1")
            return await measure(parse(["--url", url, *load], "bench"))

    assert asyncio.run(bench()) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert result["model"] == "theirs" and result["output_tokens_mean"] == 2
    assert 98 <= result["prompt_tokens_mean"] <= 104, "lengths by the mean that the server told"
    assert "hit_rate" not in result["cold"] and "does not know ignore_eos" in printed
    prompts = [body["prompt"] for body in asked if body.get("stream")]
    assert len({prompt[:300] for prompt in prompts}) == 1 and len(set(prompts)) == 3
