"""A headless Chromium for tests, driven over its DevTools protocol."""

import asyncio
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0")
SECONDS = 60.0  # a loaded machine starts a browser slowly


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab: what it shows, what it asked the network for, what its console said."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self.complaints: list[str] = []
        self.urls: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._loaded: set[str] = set()  # loaders whose page is complete

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        answering = self._answers[number] = asyncio.get_running_loop().create_future()
        session = {} if self._session is None else {"sessionId": self._session}
        await self._socket.send_json({"id": number, "method": method, "params": params, **session})
        answer = await asyncio.wait_for(answering, SECONDS)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    async def listen(self) -> None:
        """Take what the browser sends, for as long as it runs."""
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Network.requestWillBeSent":
                self.urls.append(event["params"]["request"]["url"])
            elif event["method"] == "Page.lifecycleEvent" and event["params"]["name"] == "load":
                self._loaded.add(event["params"]["loaderId"])
            elif event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(event["params"]))

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.setLifecycleEventsEnabled", enabled=True)

    async def visit(self, url: str) -> None:
        """Returns when the page is complete."""
        loader = (await self.call("Page.navigate", url=url))["loaderId"]
        async with asyncio.timeout(SECONDS):
            while loader not in self._loaded:
                await asyncio.sleep(0.02)

    async def value(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def wait(self, expression: str) -> Any:
        """Until the expression is true on the page; its value."""
        async with asyncio.timeout(SECONDS):
            while not (value := await self.value(expression)):
                await asyncio.sleep(0.05)
        return value

    async def text(self, element_id: str) -> str:
        return await self.value(f"document.getElementById({element_id!r}).innerText")

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )


@contextlib.asynccontextmanager
async def open_page(folder: Path) -> AsyncIterator[Page]:
    """A blank page of a browser of its own, which keeps its files in `folder`."""
    process = await asyncio.create_subprocess_exec(
        find_browser(), *FLAGS, f"--user-data-dir={folder}", stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(SECONDS):
            while b"DevTools listening on " not in (line := await process.stderr.readline()):
                assert line, "the browser has ended"
        url = line.decode().split()[-1]
        draining = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
            page = Page(socket)
            listening = asyncio.create_task(page.listen())
            await page.open()
            yield page
            listening.cancel()
        draining.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
