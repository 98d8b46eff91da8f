"""The dashboard: its figures are those of `/metrics`, and a browser shows them."""

import asyncio
from pathlib import Path

import pytest
from browser import find_browser, open_page
from server_process import ServerProcess, call

BODY = {"prompt": "def f(x):\n" * 30, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def test_figures_and_how_requests_ended(fake_model: Path) -> None:
    with ServerProcess(fake_model, "--api-key", "secret", program="fake_core.py") as server:
        headers = {"Authorization": "Bearer secret"}
        status, answer = call(f"{server.url}/v1/completions", {"prompt": "abc", "max_tokens": 5, "n": 2}, headers)
        assert status == 200
        status, page = call(f"{server.url}/dashboard")
        assert status == 200 and "secret" not in page and "<title>Mambalign</title>" in page
        assert call(f"{server.url}/dashboard/data")[0] == 401
        status, data = call(f"{server.url}/dashboard/data", headers=headers)
        assert status == 200 and data["status"] == {"ready": True, "text": "serving"}
        assert data["stats"]["generation_tokens_total"] == server.metrics()["generation_tokens_total"]
        usage = answer["usage"]
        assert sum(each["num_output_tokens"] for each in data["requests"]) == usage["completion_tokens"] == 10
        assert [each["finish_reason"] for each in data["requests"]] == ["length", "length"]
        assert all(each["num_prompt_tokens"] == usage["prompt_tokens"] for each in data["requests"])
        assert "abc" not in str(data)
        for _ in range(25):
            call(f"{server.url}/v1/completions", {"prompt": "abc", "max_tokens": 1}, headers)
        assert len(call(f"{server.url}/dashboard/data", headers=headers)[1]["requests"]) == 20
        assert server.stop() == 0


@pytest.mark.skipif(find_browser() is None, reason="needs chromium")
async def test_a_browser_shows_the_figures_of_a_real_server(tmp_path: Path) -> None:
    options = ["--cache-memory", "64MiB", "--max-model-len", "1024", "--spec-tokens", "3", "--check-fused-copy"]
    with ServerProcess(*options) as server:
        for _ in range(2):
            answer = await asyncio.to_thread(call, f"{server.url}/v1/completions", BODY)
        usage = answer[1]["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0 and usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        async with open_page(tmp_path / "browser") as page:
            await page.resize(1280, 900)
            await page.visit(f"{server.url}/dashboard")
            await page.wait("document.querySelectorAll('#requests tr').length === 2")
            metrics = server.metrics()
            assert await page.text("generation_tokens") == "48" == f"{metrics['generation_tokens_total']:.0f}"
            assert await page.text("hits") == f"{metrics['prefix_cache_hits_total']:,.0f}" == f"{cached:,}"
            assert await page.text("queries") == f"{metrics['prefix_cache_queries_total']:,.0f}"
            assert await page.text("precopies") == f"{metrics['precopies_total']:.0f}"
            assert await page.text("checks") != "0" and await page.text("mismatches") == "0"
            assert await page.text("status") == "serving"
            shown = metrics["spec_decode_num_accepted_tokens_total"] / metrics["spec_decode_num_draft_tokens_total"]
            assert await page.text("acceptance") == f"{100 * shown:.1f} %"
            assert (await page.text("positions")).count("%") == 3
            cells = "document.querySelectorAll('#mamba i.{}').length"
            for state in ("held", "cached", "free"):
                assert await page.value(cells.format(state)) == metrics[f'mamba_cache_blocks{{state="{state}"}}']
            last = (await page.value("document.querySelector('#requests tr').innerText")).split("\t")
            accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
            counts = [usage["prompt_tokens"], cached, usage["prompt_tokens"] - cached, 24, accepted]
            assert last[1] == "length" and last[4:9] == [f"{count:,}" for count in counts]
            for width in (360, 1280):
                await page.resize(width, 800)
                assert await page.value("document.documentElement.scrollWidth") <= width
            assert all(url.startswith((server.url, "data:")) for url in page.urls)
            assert page.complaints == []
            assert await asyncio.to_thread(server.stop) == 0
            await page.wait("document.getElementById('status').innerText.includes('the server is gone')")
            assert await page.value("document.body.classList.contains('stale')")


@pytest.mark.skipif(find_browser() is None, reason="needs chromium")
async def test_a_browser_asks_for_the_key_and_sees_a_dead_engine(fake_model: Path, tmp_path: Path) -> None:
    with ServerProcess(fake_model, "--api-key", "secret", program="fake_core.py") as server:
        async with open_page(tmp_path / "browser") as page:
            await page.visit(f"{server.url}/dashboard")
            await page.wait("document.getElementById('ask').open")
            await page.value("document.getElementById('key').value = 'secret'")
            await page.value("document.querySelector('#ask button').click()")
            await page.wait("document.getElementById('status').innerText === 'serving'")
            assert not any("secret" in url for url in page.urls)
            body = {"prompt": "<crash>", "max_tokens": 3}
            await asyncio.to_thread(call, f"{server.url}/v1/completions", body, {"Authorization": "Bearer secret"})
            await page.wait("document.getElementById('status').classList.contains('bad')")
