"""`mambalign chat`: talk to a running server in a terminal, or through a pipe, one turn a line."""

import argparse
import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mambalign.engine.api_client import ApiClient, ServerError, add_client_options, api_key, finite
from mambalign.engine.cli import Parser

DESCRIPTION = (
    "Talk to a running server. /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
)
PROMPT = "> "
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a terminal could take for commands
NO_TEMPLATE = "no_chat_template"
HINTS = {  # for codes of errors
    NO_TEMPLATE: "`mambalign chat --completions` completes text without one",
    "context_length_exceeded": "/reset begins a new conversation",
}
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def make_parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=DESCRIPTION, allow_abbrev=False)
    add_client_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument("--temperature", type=finite, metavar="X", help="0: always the likeliest token")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="of an answer (default: the server's; of chats mostly all its room)"
    )
    parser.add_argument("--completions", action="store_true", help="no conversation: complete each line as it is")
    parser.add_argument("--quiet", action="store_true", help="no figures after an answer")
    return parser


class TerminalChat:
    """One conversation. Answers go to stdout, all else to stderr."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._key = api_key(options.api_key)
        self._model: str = options.model
        self._is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._messages = self._beginning()

    def _beginning(self) -> list[dict[str, str]]:
        system = self._options.system
        return [{"role": "system", "content": system}] if system is not None else []

    def run(self) -> int:
        """Until the input ends. Returns the exit code: 1 when there is no talking to this server."""
        try:
            asyncio.run(self._connect())
        except ServerError as error:
            return self._complain(error)
        if self._is_interactive:
            print(f"{self._model} at {self._options.url}. {DESCRIPTION.partition('. ')[2]}", file=sys.stderr)
        for line in self._lines():
            if line.strip() == "/exit":
                break
            if line.strip() == "/reset":
                self._messages = self._beginning()
                continue
            try:
                self._turn(line)
            except ServerError as error:
                self._complain(error)
                if not self._is_interactive or error.code == NO_TEMPLATE:
                    return 1
        return 0

    def _complain(self, error: ServerError) -> int:
        hint = HINTS.get(error.code)
        print(f"chat: error: {error}" + (f"; {hint}" if hint else ""), file=sys.stderr)
        return 1

    async def _connect(self) -> None:
        async with ApiClient(self._options.url, self._key) as client:
            name = await client.model_name()
        self._model = self._model or name

    def _lines(self) -> Iterator[str]:
        """What is said, without empty lines. Ctrl-C drops the line that is being written."""
        if not self._is_interactive:
            sys.stdin.reconfigure(errors="strict")  # where the locale says nothing, Python lets wrong bytes through
            yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - importing it gives input() a history and editing keys
        while True:
            try:
                line = input(PROMPT)
            except KeyboardInterrupt:
                print()
            except EOFError:
                print()
                return
            else:
                if line.strip():
                    yield line

    def _turn(self, line: str) -> None:
        """Ask and show the answer; both join the conversation if something was said."""
        answer = Answer(shows_control=not self._is_interactive)
        said = [*self._messages, {"role": "user", "content": line}]
        try:
            asyncio.run(self._answer(line, said, answer))
        except KeyboardInterrupt:  # it has closed the connection
            if not self._is_interactive:
                raise
            answer.note = "stopped"
        answer.end(is_quiet=self._options.quiet)
        if answer.text:
            self._messages = [*said, {"role": "assistant", "content": answer.text}]

    async def _answer(self, line: str, messages: list[dict[str, str]], answer: "Answer") -> None:
        given = {"temperature": self._options.temperature, "max_tokens": self._options.max_tokens}
        body: dict[str, Any] = {"model": self._model}
        body |= {name: value for name, value in given.items() if value is not None}
        if self._options.completions:
            path, body = "/v1/completions", body | {"prompt": line}
        else:
            path, body = "/v1/chat/completions", body | {"messages": messages}
        async with ApiClient(self._options.url, self._key) as client:
            async with contextlib.aclosing(client.stream(path, body)) as events:
                async for event in events:
                    answer.add(event)


class Answer:
    """An answer while it comes: shown, and joined."""

    def __init__(self, *, shows_control: bool):
        self.text = ""
        self.note = ""  # why it ended, where that is worth a word
        self._shows_control = shows_control
        self._usage: dict[str, Any] | None = None
        self._start = time.perf_counter()
        self._is_dim = False
        self._shown = ""  # the last piece of it

    def add(self, event: dict[str, Any]) -> None:
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {"content": choice.get("text")}
            self._show(delta.get("reasoning_content") or "", is_dim=True)
            self._show(delta.get("content") or "", is_dim=False)
            self.text += delta.get("content") or ""
            if choice.get("finish_reason") == "length":
                self.note = "cut off at its limit"

    def _show(self, text: str, *, is_dim: bool) -> None:
        if not text:
            return
        if not self._shows_control:
            text = CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
            if is_dim != self._is_dim:
                text = (DIM if is_dim else f"{PLAIN}\n") + text
        elif is_dim:
            return  # a pipe gets what was said, not what was thought
        self._is_dim, self._shown = is_dim, text
        print(text, end="", flush=True)

    def end(self, *, is_quiet: bool) -> None:
        """Finish the line, and say what it cost."""
        print(PLAIN if self._is_dim else "", end="" if self._shown.endswith("\n") else "\n", flush=True)
        facts = [self.note] if self.note else []
        if self._usage is not None:
            facts += usage_facts(self._usage, time.perf_counter() - self._start)
        if facts and not is_quiet:
            print(f"[{'; '.join(facts)}]", file=sys.stderr, flush=True)


def usage_facts(usage: dict[str, Any], seconds: float) -> list[str]:
    """In words; without those that the server does not tell."""
    num_tokens = usage.get("completion_tokens", 0)
    facts = [f"{num_tokens} tokens, {num_tokens / seconds:.0f} a second"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        facts.append(f"{cached} of {usage.get('prompt_tokens')} prompt tokens cached")
    details = usage.get("completion_tokens_details") or {}
    accepted, rejected = details.get("accepted_prediction_tokens"), details.get("rejected_prediction_tokens")
    if accepted is not None and rejected is not None and accepted + rejected:
        facts.append(f"{accepted} of {accepted + rejected} drafts accepted")
    return facts


def chat_main(arguments: Sequence[str], prog: str = "mambalign chat") -> int:
    """The `chat` command. Returns the exit code."""
    chat = TerminalChat(make_parser(prog).parse_args(arguments))
    try:
        return chat.run()
    except UnicodeDecodeError as error:
        print(f"chat: error: the input is no {error.encoding} text: {error.reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
