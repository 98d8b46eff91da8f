"""`mambalign bench`: puts a load on a running server, of this kind or another, and says how it bore it.

One user a request, or with --users conversations in turns; all through /v1/completions, streamed. A pass is cold: its
prompts begin with what no earlier one did. With --warm each is sent once more, as it was. Ends in one line of JSON.
"""

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mambalign.engine.api_client import ApiClient, ServerError, add_client_options, api_key, finite
from mambalign.engine.bench_figures import FIGURES, Sample, figures_of, spread
from mambalign.engine.bench_plot import check_plot, plot
from mambalign.engine.bench_prompts import PromptSource
from mambalign.engine.bench_traffic import Talk, draw_requests, draw_talks
from mambalign.engine.cli import Parser

SHARED_TOKENS = 2048  # of the system prompt that users share, unless it is said
USERS_PER_S = 4.0


def make_parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog, description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_client_options(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=count, default=32, metavar="N", help="of a pass (default: 32)")
    load.add_argument("--concurrency", type=count, metavar="N", help="requests at a time (default: 8 without --rate)")
    load.add_argument("--rate", type=rate, metavar="X", help="new ones a second, at Poisson's moments")
    load.add_argument("--prompt-tokens", type=count, default=512, metavar="N", help="of a message (default: 512)")
    load.add_argument("--output-tokens", type=count, default=128, metavar="N", help="of an answer (default: 128)")
    load.add_argument(
        "--shared-prefix-tokens",
        type=int,
        metavar="N",
        help=f"that all prompts of a pass begin with (default: 0, with --users {SHARED_TOKENS})",
    )
    load.add_argument("--temperature", type=finite, default=0.0, metavar="X", help="default: 0")
    load.add_argument("--warm", action="store_true", help="after each pass the same prompts again")
    load.add_argument("--repeats", type=count, default=3, metavar="N", help="passes (default: 3)")
    load.add_argument("--seed", type=int, metavar="N", help="the same prompts in every run (default: new ones)")
    talks = parser.add_argument_group(
        "conversations", "messages are 1/8 to all of --prompt-tokens long, answers 1/4 to all of --output-tokens"
    )
    talks.add_argument("--users", type=count, metavar="N", help="who talk in turns behind one system prompt")
    talks.add_argument("--turns", type=count, default=3, metavar="N", help="of each (default: 3)")
    talks.add_argument(
        "--long-prompt-tokens", type=count, default=4096, metavar="N", help="of every eighth's first (default: 4096)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw waiting times and rates into this file (needs matplotlib)")
    return parser


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def rate(text: str) -> float:
    if (value := finite(text)) <= 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {value}")
    return value


def parse(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """The options, with defaults that depend on others filled in; leaves with exit code 2 on a mistake."""
    parser = make_parser(prog)
    options = parser.parse_args(arguments)
    if options.shared_prefix_tokens is None:
        options.shared_prefix_tokens = 0 if options.users is None else SHARED_TOKENS
    if options.users is not None:
        options.rate = options.rate or USERS_PER_S
    elif options.rate is None:
        options.concurrency = options.concurrency or 8
    if options.plot is not None:
        try:
            check_plot(options.plot)
        except ValueError as error:
            parser.error(str(error))
    return options


@dataclass(frozen=True)
class Script:
    """A user and the texts that it says."""

    talk: Talk
    messages: list[str]  # the first with the shared prefix


class Bench:
    """Passes over one server, one after the other."""

    def __init__(self, client: ApiClient, options: argparse.Namespace):
        self._client, self._options = client, options
        self._rng = random.Random(options.seed if options.seed is not None else secrets.randbits(64))
        self._fields: dict[str, Any] = {"temperature": options.temperature}
        self.passes: dict[str, list[list[Sample]]] = {"cold": []} | ({"warm": []} if options.warm else {})

    async def run(self) -> dict[str, Any]:
        """All passes; the results as numbers. Raises ServerError when the server takes no request at all."""
        options = self._options
        self._fields["model"] = options.model or await self._client.model_name()
        source = await PromptSource.open(self._client, self._fields["model"], self._rng)
        if not await self._takes_ignore_eos(source):
            print("this server does not know ignore_eos: answers may end early", flush=True)
        for repeat in range(options.repeats):
            scripts = await self._write(source)
            for kind, samples in self.passes.items():
                samples.append(await self._play(scripts))
                show_pass(f"{kind} {repeat + 1}", samples[-1])
        results = {kind: spread([figures_of(s) for s in passes]) for kind, passes in self.passes.items()}
        every = [sample for passes in self.passes.values() for samples in passes for sample in samples]
        failed = [sample.error for sample in every if sample.error is not None]
        show_results(results)
        if failed:
            print(f"{len(failed)} of {len(every)} requests failed; the first: {failed[0]}", flush=True)
        return {
            "model": self._fields["model"],
            "setting": {k: v for k, v in vars(options).items() if k not in ("api_key", "model", "plot")},
            "requests": len(every),
            "failed": len(failed),
            "prompt_tokens_mean": round(sum(s.num_prompt_tokens for s in every) / len(every), 1),
            "output_tokens_mean": round(sum(s.num_tokens for s in every) / len(every), 1),
            **results,
        }

    async def _takes_ignore_eos(self, source: PromptSource) -> bool:
        """Ask once with the field that keeps answers as long as asked for, else without; warms the server up too."""
        prompt = await source.take(16)
        body = self._fields | {"prompt": prompt, "max_tokens": 1}
        with contextlib.suppress(ServerError):
            await self._client.ask("POST", "/v1/completions", body | {"ignore_eos": True})
            self._fields["ignore_eos"] = True
            return True
        await self._client.ask("POST", "/v1/completions", body)
        return False

    async def _write(self, source: PromptSource) -> list[Script]:
        """What the users of a pass will say."""
        options = self._options
        if options.users is None:
            talks = draw_requests(
                self._rng, options.requests, options.rate, options.prompt_tokens, options.output_tokens
            )
        else:
            talks = draw_talks(
                self._rng,
                options.users,
                options.turns,
                rate=options.rate,
                message_tokens=options.prompt_tokens,
                long_tokens=options.long_prompt_tokens,
                reply_tokens=options.output_tokens,
            )
        shared = await source.take_new(options.shared_prefix_tokens)
        scripts = []
        for talk in talks:
            first, *others = talk.turns
            opening = shared + await (source.take if shared else source.take_new)(first.message_tokens)
            scripts.append(Script(talk, [opening, *[await source.take(turn.message_tokens) for turn in others]]))
        return scripts

    async def _play(self, scripts: list[Script]) -> list[Sample]:
        samples: list[Sample] = []
        free = asyncio.Semaphore(self._options.concurrency or len(scripts))
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for script in scripts:
                group.create_task(self._talk(script, start, free, samples))
        return samples

    async def _talk(self, script: Script, start: float, free: asyncio.Semaphore, samples: list[Sample]) -> None:
        text, due = "", start + script.talk.starts_at
        for turn, message in zip(script.talk.turns, script.messages, strict=True):
            await asyncio.sleep(due - time.perf_counter())
            async with free:
                is_open = self._options.rate is not None  # then waiting for one's turn counts
                sample = Sample(due if is_open else time.perf_counter())
                samples.append(sample)
                await self._ask(text + message, turn.reply_tokens, sample)
            if sample.error is not None:
                return
            text += message + sample.text
            due = time.perf_counter() + turn.pause

    async def _ask(self, prompt: str, num_tokens: int, sample: Sample) -> None:
        body = self._fields | {"prompt": prompt, "max_tokens": num_tokens}
        try:
            async with contextlib.aclosing(self._client.stream("/v1/completions", body)) as events:
                async for event in events:
                    sample.usage = event.get("usage") or sample.usage
                    for choice in event.get("choices") or []:
                        text = choice.get("text") or ""
                        if text or (choice.get("finish_reason") and not sample.seen):
                            sample.seen.append(time.perf_counter())
                        sample.text += text
        except ServerError as error:
            sample.error = str(error)


def show_pass(name: str, samples: list[Sample]) -> None:
    """One line while there is more to come."""
    rate = figures_of(samples)["output_tokens_per_s"]
    how = "none was answered" if rate is None else f"{rate:.1f} output tokens a second"
    print(f"{name:8} {len(samples)} requests, {how}", flush=True)


def show_results(results: dict[str, dict[str, dict[str, float]]]) -> None:
    for kind, figures in results.items():
        print(f"\n{kind:32} {'median':>10} {'least':>10} {'most':>10}")
        for figure in FIGURES:
            if numbers := figures.get(figure.name):
                columns = " ".join(f"{numbers[name]:10.{figure.decimals}f}" for name in ("median", "min", "max"))
                print(f"{figure.label:32} {columns}")


async def measure(options: argparse.Namespace) -> int:
    async with ApiClient(options.url, api_key(options.api_key)) as client:
        bench = Bench(client, options)
        result = await bench.run()
    if options.plot is not None:
        plot(bench.passes, f"{result['model']} at {client.url}", options.plot)
        print(f"\ndrawn into {options.plot}")
    print(f"\n{json.dumps(result)}")
    return 1 if result["failed"] else 0


def bench_main(arguments: Sequence[str], prog: str = "mambalign bench") -> int:
    """The `bench` command. Returns the exit code: 1 when a request failed."""
    options = parse(arguments, prog)
    try:
        return asyncio.run(measure(options))
    except ServerError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
