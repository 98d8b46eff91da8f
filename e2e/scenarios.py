"""The prefix-cache suite: scenarios over any engine. Each checks texts, what the cache gave, and that all is freed.

A scenario gets a `Suite`: a cell, the oracle, and the cell's engines by the name of their pools. It starts from an
empty cache. Prompts are pieces of standard-library source; the same for every cell of one block size.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asks import After, Answer, Ask, Client
from cells import WINDOW, Cell
from oracle import Oracle

from mambalign.engine.messages import EngineStats

HEADER_TOKENS = 5  # of a chat's generation header, here


@dataclass
class Suite:
    """One cell on its way through the scenarios. `is_thorough`: long versions of them."""

    cell: Cell
    oracle: Oracle
    open_client: Callable[[Cell, str], Client]
    is_thorough: bool = False
    clients: dict[str, Client] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)  # scenarios that passed

    def client(self, pools: str = "roomy") -> Client:
        if pools not in self.clients:
            self.clients[pools] = self.open_client(self.cell, pools)
        return self.clients[pools]

    def play(self, scenario: Callable[["Suite"], None]) -> None:
        for client in self.clients.values():
            client.reset_prefix_cache()
        scenario(self)
        for client in self.clients.values():
            client.assert_idle()
        self.ran.add(scenario.__name__)

    def close(self) -> None:
        """Every engine, also when one of them does not end well."""
        with contextlib.ExitStack() as stack:
            for client in self.clients.values():
                stack.callback(client.close)

    def prompts(self, modules: Sequence[str], lengths: Sequence[int], num_tokens: int) -> list[list[int]]:
        pairs = zip(modules, lengths, strict=False)
        return [self.oracle.prompt(module, length, num_tokens) for module, length in pairs]

    def run(self, asks: Sequence[Ask], pools: str = "roomy") -> list[Answer]:
        """Run asks and check what came: whole texts where nothing was cut short, else their beginnings."""
        answers = self.client(pools).run(asks)
        for i, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
            self.check(ask, answer, f"ask {i} of {len(asks)}")
        return answers

    def check(self, ask: Ask, answer: Answer, what: str) -> None:
        what = f"{self.cell.name}, {what}"
        for choice in answer.choices:
            if ask.abort_after is None:
                assert (len(choice.token_ids), choice.finish_reason) == (ask.max_tokens, "length"), what
                assert (choice.logprobs is not None) == ask.logprobs, what
            if ask.temperature == 0 and choice.token_ids:
                self.oracle.assert_text(ask.prompt, choice.token_ids, choice.logprobs, what)
        if ask.abort_after is None:
            assert 0 <= answer.num_accepted_tokens <= answer.num_draft_tokens
            assert answer.num_accepted_tokens < answer.num_tokens
            assert answer.num_draft_tokens == 0 or self.cell.spec_tokens

    def assert_cached(self, answers: Sequence[Answer], expected: Sequence[int]) -> None:
        found = [answer.num_cached_tokens for answer in answers]
        assert found == list(expected), f"{self.cell.name}: cached {found}, must be {list(expected)}"


def asks_for(prompts: Sequence[list[int]], max_tokens: int) -> list[Ask]:
    """One each; every other one asks for log-probabilities."""
    return [Ask(prompt, max_tokens, logprobs=i % 2 == 0) for i, prompt in enumerate(prompts)]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def cold_and_warm(suite: Suite) -> None:
    """First nothing is cached, then the hit law; the metrics say the same."""
    size, reply = suite.cell.block_tokens, 18
    lengths = [1, size - 1, size + 1, 2 * size - 5, 2 * size + size // 2]
    prompts = suite.prompts(["bisect", "argparse", "textwrap", "heapq", "shlex"], lengths, reply)
    asks = asks_for(prompts, reply)
    suite.assert_cached(suite.run(asks), [0] * len(asks))
    before = suite.client().stats()
    warm = suite.run(asks)
    suite.assert_cached(warm, [suite.cell.cached(n) for n in lengths])
    after = suite.client().stats()
    assert after.prefix_cache_queries_total - before.prefix_cache_queries_total == sum(lengths)
    assert after.prefix_cache_hits_total - before.prefix_cache_hits_total == sum(map(suite.cell.cached, lengths))
    assert after.generation_tokens_total - before.generation_tokens_total == reply * len(asks)
    assert_drafts_counted(before, after, warm)


def assert_drafts_counted(before: EngineStats, after: EngineStats, answers: Sequence[Answer]) -> None:
    drafted = after.spec_decode_num_draft_tokens_total - before.spec_decode_num_draft_tokens_total
    accepted = after.spec_decode_num_accepted_tokens_total - before.spec_decode_num_accepted_tokens_total
    assert drafted == sum(answer.num_draft_tokens for answer in answers)
    assert accepted == sum(answer.num_accepted_tokens for answer in answers)


def block_multiples(suite: Suite) -> None:
    """Prompts of kB-1, kB and kB+1 tokens, each an extension of the one before, then 1..W tokens behind kB."""
    size, reply = suite.cell.block_tokens, 6
    for module, k in (("fnmatch", 1), ("csv", 2)):
        longest = suite.oracle.prompt(module, k * size + WINDOW + 1, reply)
        for n, seen in ((k * size - 1, 0), (k * size, k * size - 1), (k * size + 1, k * size)):
            ask = Ask(longest[:n], reply, logprobs=True)
            suite.assert_cached(suite.run([ask]), [suite.cell.cached(n, seen)])
            suite.assert_cached(suite.run([ask]), [suite.cell.cached(n)])
        suffixed = asks_for([longest[: k * size + i] for i in range(1, WINDOW + 2)], reply)
        suite.assert_cached(suite.run(suffixed), [k * size] * len(suffixed))


def junction(suite: Suite) -> None:
    """Texts that share 1.5 blocks: the second leaves a state where they part, the third resumes from it."""
    size, reply = suite.cell.block_tokens, 9
    shared = suite.oracle.source("configparser")[: size + size // 2]
    tails = [("string", 3 * size + size // 2), ("calendar", 3 * size + 5), ("difflib", 2 * size + size // 2 + 3)]
    prompts = [suite.oracle.prompt(module, length, reply, prefix=shared) for module, length in tails]
    cached = [suite.run([ask])[0].num_cached_tokens for ask in asks_for(prompts, reply)]
    assert cached == [0, 0, size], f"{suite.cell.name}: {cached}"
    again = suite.run(asks_for(prompts, reply))
    suite.assert_cached(again, [suite.cell.cached(len(prompt)) for prompt in prompts])


def conversation(suite: Suite) -> None:
    """Turns that grow by reply and new text; the generation header stays in the text, or gives way to the reply."""
    size, reply = suite.cell.block_tokens, 18
    header = suite.oracle.source("sched")[40 : 40 + HEADER_TOKENS]
    for keeps_header, module in ((True, "statistics"), (False, "tempfile")):
        history: list[int] = []
        seen: list[int] = []
        for turn in range(3):
            length = len(history) + (size + size // 3 if turn == 0 else size // 2 + 3) + HEADER_TOKENS
            prompt = suite.oracle.prompt(module, length, reply, prefix=history, suffix=header)
            answers = suite.run([Ask(prompt, reply, logprobs=turn == 1)])
            suite.assert_cached(answers, [suite.cell.cached(len(prompt), common_length(prompt, seen))])
            text = answers[0].choices[0].token_ids
            seen = prompt + text[:-1]  # the last token is delivered and never run
            history = (prompt if keeps_header else prompt[:-HEADER_TOKENS]) + text


def abort(suite: Suite) -> None:
    """Some leave at a random step; the others do not notice, and a repeat finds nothing wrong in the cache."""
    size, reply = suite.cell.block_tokens, 24
    modules = ["zipfile", "queue", "argparse", "heapq", "shlex", "csv"]
    lengths = [2 * size + 7, size + 3, 3 * size - 2, 9, 2 * size, size - 3]
    asks = asks_for(suite.prompts(modules, lengths, reply), reply)
    random_steps = random.Random(suite.cell.name)
    leaving = {i: random_steps.randint(*bounds) for i, bounds in ((0, (1, 3)), (2, (0, 12)), (3, (1, 8)), (4, (0, 0)))}
    some = [Ask(ask.prompt, reply, ask.logprobs, abort_after=leaving.get(i)) for i, ask in enumerate(asks)]
    suite.run(some)
    suite.client().assert_idle()
    for ask, answer in zip(asks, suite.run(asks), strict=True):
        assert answer.num_cached_tokens <= suite.cell.cached(len(ask.prompt))
    shorter = asks_for([ask.prompt for ask in asks], 3)
    suite.assert_cached(suite.run(shorter), [suite.cell.cached(n) for n in lengths])


def preemption(suite: Suite) -> None:
    """More than fits: requests lose everything and start over, the text is the same."""
    size, reply = suite.cell.block_tokens, 40
    lengths = [size + 9 - i for i in range(5)]
    asks = asks_for(suite.prompts(["bisect", "fnmatch", "string", "difflib", "sched"], lengths, reply), reply)
    before = suite.client("tight").stats().num_preemptions_total
    for _ in range(8):  # a server's requests arrive one after the other: how many overlap is not ours to say
        suite.run(asks, "tight")
        if suite.client("tight").stats().num_preemptions_total > before:
            return
    raise AssertionError(f"{suite.cell.name}: nobody was preempted")


def reset(suite: Suite) -> None:
    """The cache is forgotten while requests run, one of which repeats another's prompt right after."""
    size, reply = suite.cell.block_tokens, 24
    lengths = [2 * size + 5, size + 1, size - 4]
    prompts = suite.prompts(["calendar", "statistics", "zipfile"], lengths, reply)
    asks = asks_for(prompts, reply)
    late = Ask(prompts[0], reply, logprobs=True, start=After(0, 12))
    asks[0] = Ask(prompts[0], reply, reset_after=10)
    answers = suite.run([*asks, late])
    assert answers[-1].num_cached_tokens <= suite.cell.cached(lengths[0])
    suite.client().assert_idle()
    suite.client().reset_prefix_cache()
    again = asks_for(prompts, 5)
    suite.assert_cached(suite.run(again), [0] * len(again))
    suite.assert_cached(suite.run(again), [suite.cell.cached(n) for n in lengths])


def eviction(suite: Suite) -> None:
    """The pools wrap several times; the first request comes back to find nothing, and says the same."""
    size, reply = suite.cell.block_tokens, 6
    modules = ["argparse", "textwrap", "heapq", "bisect", "shlex", "fnmatch", "csv", "configparser", "string"]
    lengths = [size - 3, size + 3, 2 * size - 3] * 3
    first, *others = asks_for(suite.prompts(modules, lengths, reply), reply)
    suite.assert_cached(suite.run([first], "tight"), [0])
    for start in range(0, 1000 if suite.is_thorough else 16, 2):
        suite.run([others[(start + i) % len(others)] for i in range(2)], "tight")
    suite.assert_cached(suite.run([first], "tight"), [0])
    suite.assert_cached(suite.run([first], "tight"), [suite.cell.cached(len(first.prompt))])


def choices_at_cold_start(suite: Suite) -> None:
    """Several choices of a prompt that nobody has computed yet, and the same prompt twice more in the same step."""
    size, reply = suite.cell.block_tokens, 14
    prompt = suite.oracle.prompt("queue", 2 * size + 2, reply)
    greedy = Ask(prompt, reply, n=3)
    sampled = Ask(prompt, reply, logprobs=True, n=2, temperature=0.8, seed=7)
    cold = suite.run([greedy, sampled, Ask(prompt, reply, logprobs=True)])
    assert min(answer.num_cached_tokens for answer in cold) == 0  # through a server any of them may come first
    warm = suite.run([sampled, greedy])
    suite.assert_cached(warm, [suite.cell.cached(len(prompt))] * 2)
    for answer in (cold[1], warm[0]):
        texts = [choice.token_ids for choice in answer.choices]
        assert texts[0] != texts[1]
        suite.oracle.assert_sampled(sampled, answer, suite.cell.name)


def consumers(suite: Suite) -> None:
    """Requests resume from blocks that their producer has just published, while it decodes on."""
    size, reply, short = suite.cell.block_tokens, 40, 9
    prompt = suite.oracle.prompt("textwrap", size + 5, reply)
    text = suite.oracle.expected(prompt, reply).token_ids
    asks = [Ask(prompt, reply)]
    asks += [Ask(prompt, short, logprobs=True, start=After(0, t)) for t in (1, 7, 8)]
    for num_known, module in ((14, "configparser"), (30, "difflib")):
        known = prompt + text[:num_known]
        longer = suite.oracle.prompt(module, len(known) + 6, short, prefix=known)
        asks.append(Ask(longer, short, start=After(0, num_known + suite.cell.spec_tokens + 2)))
    answers = suite.run(asks)
    seen = [0, *[len(prompt)] * 3, *[common_length(ask.prompt, prompt + text) for ask in asks[4:]]]
    suite.assert_cached(answers, [suite.cell.cached(len(a.prompt), s) for a, s in zip(asks, seen, strict=True)])
    suite.assert_cached(suite.run([asks[0]]), [suite.cell.cached(len(prompt))])


def without_cache(suite: Suite) -> None:
    """Migration without look-up (SD cells), or no boundary kept at all (DS cells): the same texts, and no hits."""
    size, reply = suite.cell.block_tokens, 12
    lengths = [size - 1, size + 1, 2 * size - 5]
    asks = asks_for(suite.prompts(["argparse", "textwrap", "heapq"], lengths, reply), reply)
    for _ in range(2):
        suite.assert_cached(suite.run(asks, "off"), [0] * len(asks))


ROOMY_SCENARIOS = (
    cold_and_warm,
    block_multiples,
    junction,
    conversation,
    abort,
    reset,
    choices_at_cold_start,
    consumers,
)
TIGHT_SCENARIOS = (preemption, eviction)
SCENARIOS = (*ROOMY_SCENARIOS, *TIGHT_SCENARIOS, without_cache)


def assert_paths_ran(suite: Suite) -> None:
    """What the cell is about did happen, summed over its engines."""
    stats = [client.stats() for client in suite.clients.values()]

    def total(name: str) -> int:
        return sum(getattr(one, name) for one in stats)

    assert total("prefix_cache_hits_total") > 0 and total("precopies_total") > 0
    checks = sum((Counter(one.fused_copy_checks) for one in stats), Counter())
    copies = sum((Counter(one.fused_copy_copies) for one in stats), Counter())
    assert checks.total() > copies.total() > 0, "the fused copy was not checked"
    assert total("fused_copy_mismatches_total") == 0
    if {scenario.__name__ for scenario in TIGHT_SCENARIOS} <= suite.ran:
        assert total("num_preemptions_total") > 0
    spec_tokens = suite.cell.spec_tokens
    if spec_tokens == 0:
        assert total("spec_decode_num_draft_tokens_total") == 0
        return
    drafts, accepted = total("spec_decode_num_drafts_total"), total("spec_decode_num_accepted_tokens_total")
    assert total("precopies_biased_total") > 0, "no state moved with a token bias"
    assert any(int(bias) > 0 for bias in copies), f"copies by bias: {copies}"
    assert total("postcopies_total") > 0, "no boundary state was copied after a step"
    assert 0 < accepted < total("spec_decode_num_draft_tokens_total"), "drafts must be accepted, and rejected"
    by_position = [sum(one.spec_decode_accepted_per_position[i] for one in stats) for i in range(spec_tokens)]
    assert min(by_position) > 0, f"accepted by position: {by_position}"
    assert accepted / drafts > 0.3 * min(spec_tokens, 3), f"{accepted} accepted in {drafts} steps"
