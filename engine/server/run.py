"""The life of a server: listen, load, say how to talk to it, serve, drain, leave with a true exit code."""

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import signal
import ssl
import sys

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from mambalign.engine.api_keys import ApiKeys
from mambalign.engine.checkpoint import CheckpointFacts, load_tokenizer
from mambalign.engine.client import EngineClient
from mambalign.engine.config import EngineConfig, ServerConfig
from mambalign.engine.core_process import DEFAULT_CORE, LOG_FORMAT, Ready
from mambalign.engine.errors import EngineError
from mambalign.engine.option import ConfigError
from mambalign.engine.output import output_that_never_blocks
from mambalign.engine.server.access import AccessLog, make_access_logger
from mambalign.engine.server.app import make_app
from mambalign.engine.server.chat_template import ChatTemplate
from mambalign.engine.server.state import ServerState
from mambalign.engine.server.token_text import TokenText

LAST_ANSWERS_SECONDS = 1.0  # a dead engine's server lives on so long, to say so to its clients and probes


def run_server(config: EngineConfig, server: ServerConfig, facts: CheckpointFacts, *, core: str = DEFAULT_CORE) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns 0 after a drained stop, 1 for a failure, 2 for a refused option."""

    async def run() -> int:
        try:
            made = Server(config, server, facts, core)
        except ConfigError as error:
            complain(str(error))
            return 2
        return await made.run()

    with output_that_never_blocks():
        logging.basicConfig(level=server.log_level.upper(), format=LOG_FORMAT)
        server_logger.addFilter(is_ours)
        return asyncio.run(run())


def say(text: str) -> None:
    """A line for who started the server."""
    print(text, flush=True)


def complain(text: str) -> None:
    print(f"serve: error: {text}", file=sys.stderr, flush=True)


def is_ours(record: logging.LogRecord) -> bool:
    """Not a stranger's request that is no HTTP: the access log has a line of it, and a trace would tell nothing."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


def tls_context(options: ServerConfig) -> ssl.SSLContext | None:
    """For HTTPS, when it is asked for. Raises ConfigError."""
    if options.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        name = f"--ssl-certfile {options.ssl_certfile}"
        raise ConfigError(f"{name}: cannot be used: {error.strerror or error}") from error
    return context


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server:
    """One listening socket and one engine process."""

    def __init__(self, config: EngineConfig, server: ServerConfig, facts: CheckpointFacts, core: str):
        self.options = server
        self.facts = facts
        self.client = EngineClient(
            config,
            progress=lambda text: say(f"  {text}"),
            core=core,
            log_level=server.log_level,
            stall_seconds=server.engine_timeout,
        )
        name = server.served_model_name or facts.name
        self.state = ServerState(self.client, name, server, ApiKeys.read(server))
        self.tls = tls_context(server)
        self.stop_signal = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.on_signal, number)
        runner = web.AppRunner(
            make_app(self.state),
            handler_cancellation=True,  # a client that leaves ends its handler, and that aborts its requests
            access_log_class=AccessLog,
            access_log=make_access_logger(logging.getLogger().level),
            shutdown_timeout=LAST_ANSWERS_SECONDS,
            lingering_time=LAST_ANSWERS_SECONDS,  # for the rest of a body that nobody reads
            keepalive_timeout=self.options.read_timeout,  # from the connection's start on
        )
        await runner.setup()
        site = web.TCPSite(runner, self.options.host, self.options.port, ssl_context=self.tls)
        try:
            await site.start()
        except OSError as error:
            complain(f"cannot listen on {self.options.host} port {self.options.port}: {error.strerror or error}")
            await runner.cleanup()
            return 1
        try:
            return await self.load_and_serve(site)
        finally:
            await self.client.shutdown(drain=False)
            await runner.cleanup()

    def on_signal(self, number: int) -> None:
        """The first asks for a drained stop; the second ends everything now (the engine follows this process)."""
        if self.stop_signal.is_set():
            os._exit(128 + number)
        self.stop_signal.set()

    async def load_and_serve(self, site: web.TCPSite) -> int:
        say(f"loading {self.facts.name} from {self.facts.path}")
        loading = asyncio.gather(self.client.start(), self.load_tokenizer())
        stopping = asyncio.create_task(self.stop_signal.wait())
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError, ConfigError):
                await loading
            say("stopped while loading")
            return 0
        try:
            ready, _ = loading.result()
        except (ConfigError, EngineError) as error:
            complain(str(error))
            return 2 if isinstance(error, ConfigError) else 1
        self.introduce(ready, site)
        death = asyncio.create_task(self.client.wait_dead())
        await asyncio.wait([death, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not death.done():
            await self.drain(site, death)
        stopping.cancel()
        if death.done():
            complain(f"{death.result()}; leaving")
            await asyncio.sleep(LAST_ANSWERS_SECONDS)
            return 1
        death.cancel()
        await self.client.shutdown(drain=True)
        say("stopped")
        return 0

    async def load_tokenizer(self) -> None:
        tokenizer = await asyncio.to_thread(load_tokenizer, self.facts.path)
        self.state.token_text = TokenText(tokenizer)
        options = self.options
        self.state.chat_template = ChatTemplate(
            tokenizer, options.chat_template, options.tool_call_parser, options.reasoning_parser
        )
        self.state.tokenizer = tokenizer

    async def drain(self, site: web.TCPSite, death: asyncio.Task[str]) -> None:
        """Take nothing new; wait until every handler has answered, or the engine dies."""
        self.state.draining = True
        await site.stop()
        if self.state.num_handlers:
            say(f"finishing {self.state.num_handlers} request(s) first; Ctrl-C again quits at once")
        while self.state.num_handlers and not death.done():
            await asyncio.sleep(0.02)

    def introduce(self, ready: Ready, site: web.TCPSite) -> None:
        """The plan, the address, and a line to try."""
        for line in ready.plan:
            say(f"  {line}")
        url = self.url(site)
        body = {"model": self.state.model_name, "prompt": "def read_lines(path):", "max_tokens": 64, "temperature": 0}
        key = " -H 'Authorization: Bearer KEY'" if self.state.api_keys else ""
        if not is_loopback(self.options.host) and not self.state.api_keys:
            say(f"warning: on {self.options.host} everyone who reaches this machine can use it; see --api-key")
        say(f"serving {self.state.model_name} at {url}/v1 (Ctrl-C stops); try:")
        say(f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'")

    def url(self, site: web.TCPSite) -> str:
        """Where this server can be reached from this machine."""
        host, port = self.options.host, site._server.sockets[0].getsockname()[1]  # the port that 0 became
        if host in ("0.0.0.0", "::"):
            host = "localhost"
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
