"""The command line: `serve [model] [options]`, and the same as `mambalign serve`. Made from the options' dataclasses.

Everything that can be refused without weights is refused here, in one line and with exit code 2, before torch is
imported.
"""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import Field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from types import NoneType
from typing import Any, NoReturn

from mambalign.engine.api_keys import ApiKeys
from mambalign.engine.checkpoint import CheckpointFacts, load_chat_template, locate, read_facts
from mambalign.engine.config import EngineConfig, ServerConfig
from mambalign.engine.option import ConfigError, allowed_types, build_part, check_values, flag, parse_bytes
from mambalign.engine.resolution import check_checkpoint

DESCRIPTION = "Serve a hybrid Mamba model over the OpenAI API, with prefix caching and speculative decoding."
GROUPS = {
    "model": "model",
    "cache": "caches",
    "scheduler": "scheduling",
    "spec": "speculative decoding",
    "runner": "runner",
}


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is told in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n")


def package_version() -> str:
    try:
        return version("mambalign")
    except PackageNotFoundError:  # run from a folder that was never installed
        return "unknown"


def make_parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        usage=f"{prog} [model] [options]",
        description=DESCRIPTION,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    parser.add_argument("--version", action="version", version=f"mambalign {package_version()}")
    for part in fields(EngineConfig):
        owner: Any = part.default_factory
        add_options(parser.add_argument_group(GROUPS[part.name]), owner)
    add_options(parser.add_argument_group("server"), ServerConfig)
    return parser


def add_options(group: Any, owner: Any) -> None:
    """One argument per field of an options dataclass."""
    for f in fields(owner):
        if f.metadata.get("bench_only"):
            continue  # no server's option
        text = f.metadata["help"].replace("%", "%%")
        if f.metadata.get("positional"):
            group.add_argument(f.name, nargs="?", default=f.default, help=text)
        elif f.type is bool and f.default is False:
            group.add_argument(flag(f.name), action="store_true", help=text)
        elif bool in allowed_types(f.type):
            group.add_argument(flag(f.name), action=argparse.BooleanOptionalAction, default=f.default, help=text)
        else:
            add_value_option(group, f, text)


def add_value_option(group: Any, f: Field[Any], text: str) -> None:
    choices = f.metadata.get("choices")
    kind = next(t for t in allowed_types(f.type) if t is not NoneType)
    refused = f.metadata.get("refused", {})
    group.add_argument(
        flag(f.name),
        type=byte_count if f.metadata.get("bytes") else kind,
        default=f.default,
        metavar="|".join(c for c in choices if c not in refused) if choices else metavar(f, kind),
        help=text if f.default is None else f"{text} (default: {f.default})",
    )


def metavar(f: Field[Any], kind: type) -> str:
    if f.metadata.get("bytes"):
        return "BYTES"
    return {int: "N", float: "X", str: "TEXT"}[kind]


def byte_count(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(parser: Parser, arguments: Sequence[str]) -> tuple[EngineConfig, ServerConfig, CheckpointFacts]:
    """Read the options and the checkpoint's facts; leave with exit code 2 on anything that cannot be served."""
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        close = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        parser.error(f"unknown argument {unknown[0]}" + (f"; did you mean {close[0]}?" if close else ""))
    options = vars(namespace)
    try:
        server = build_part(ServerConfig, options)
        check_values(server)
        if server.chat_template is not None:
            server = replace(server, chat_template=load_chat_template(server.chat_template))
        if server.ssl_keyfile is not None and server.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile: needs --ssl-certfile")
        ApiKeys.read(server)
        config = EngineConfig.from_options(**options)
        facts = read_facts(config.model.model, locate(config.model.model, weights=False))
        check_checkpoint(config, facts)
    except ConfigError as error:
        parser.error(str(error))
    return config, server, facts


def serve_main(arguments: Sequence[str] | None = None, prog: str = "serve") -> int:
    """The `serve` command. Returns the exit code: 0 after a drained stop, 1 when the engine died, 2 for options."""
    config, server, facts = parse(make_parser(prog), sys.argv[1:] if arguments is None else arguments)
    from mambalign.engine.server.run import run_server  # after the options: it takes a second to import

    return run_server(config, server, facts)


def main(arguments: Sequence[str] | None = None) -> int:
    """The `mambalign` command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = Parser(prog="mambalign", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mambalign {package_version()}")
    words = "serve: start the server; chat: talk to one; bench: measure one; each has a --help of its own"
    parser.add_argument("command", choices=("serve", "chat", "bench"), help=words)
    command = parser.parse_args(arguments[:1]).command
    prog, rest = f"mambalign {command}", arguments[1:]
    if command == "serve":
        return serve_main(rest, prog)
    try:
        if command == "chat":
            from mambalign.engine.terminal_chat import chat_main  # like bench, it needs nothing of what serve needs

            return chat_main(rest, prog)
        from mambalign.engine.bench import bench_main

        return bench_main(rest, prog)
    except BrokenPipeError:  # nobody reads what it prints
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is printed at exit
        return 1


if __name__ == "__main__":
    sys.exit(main())
