"""Plans drawn at random, one a seed: engines over their whole range, traffic that aims at block edges and at itself.

Runner, layout and number of drafts go round with the seed, so that any `NUM_ENGINES` seeds in a row hold all of them;
those with most drafts twice, for the states that only they move.
"""

import itertools
import random

import msgspec
from lossless.plan import GRAMMARS, STYLES, Ask, Piece, Plan, Setup, Stop
from lossless.tally import MAX_BIAS

SPEC_TOKENS = (*range(MAX_BIAS, -1, -1), MAX_BIAS, MAX_BIAS - 1)
ENGINES = tuple(itertools.product(SPEC_TOKENS, ("v1", "v2"), ("SD", "DS")))
NUM_ENGINES = len(ENGINES)
SHIPPED_EVERY = 7  # of so many seeds one runs the model that ships, whose steps take longer; prime to NUM_ENGINES
BLOCK_TOKENS = (16, 16, 16, 16, 32, 32, 64, 128)
MAX_ASKS = 8
LONGEST_REPLY = 38
STREAMS = (0, 0, 0, 1, 2)
GRAMMAR_SHARE = 0.1
LAST_STEP = 60  # of arrivals and resets


def draw_plan(seed: int) -> Plan:
    """Always the same plan for the same seed."""
    rng = random.Random(seed)
    setup = draw_setup(rng, seed)
    asks: list[Ask] = []
    for _ in range(rng.randint(3, MAX_ASKS)):
        asks.append(draw_ask(rng, setup, asks))
    resets = tuple(rng.randint(1, LAST_STEP) for _ in range(rng.choice([0, 0, 0, 1, 3])))
    return Plan(setup, tuple(draw_grammar(rng, ask) for ask in asks), resets)


def draw_setup(rng: random.Random, seed: int) -> Setup:
    """Half of the pools are the smallest that start-up takes, or a few blocks more."""
    spec_tokens, runner, layout = ENGINES[seed % NUM_ENGINES]
    block = rng.choice(BLOCK_TOKENS)
    method = rng.choice(["scripted"] * 4 + ["mtp", "ngram"])
    step_tokens = rng.choice([block, 2 * block - 1, rng.randint(spec_tokens + 1, 128), 512, 8192, 8192])
    is_tight = rng.random() < 0.5
    return Setup(
        model="shipped" if seed % SHIPPED_EVERY == 0 else "tiny",
        runner=runner,
        layout=layout,
        block_tokens=block,
        kv_block_tokens=rng.choice([16, 16, 8, min(block, 32)]),
        spec_tokens=spec_tokens,
        spec_method=rng.choice(["mtp", "ngram"]) if method == "scripted" else method,
        scripted=method == "scripted",
        step_tokens=max(spec_tokens + 1, step_tokens),
        rows=rng.randint(2, 6),
        max_model_len=LONGEST_REPLY + rng.choice([block, 2 * block + 7, 3 * block]),
        spare_states=rng.choice([0, 1, rng.randint(2, 10)]) if is_tight else rng.randint(20, 60),
        spare_kv_blocks=rng.choice([0, 1, rng.randint(2, 10)]) if is_tight else rng.randint(20, 60),
        prefix_caching=rng.random() < 0.9,
        checked=rng.random() < 0.7,
        late=runner == "v2" and rng.random() < 0.5,
    )


def draw_ask(rng: random.Random, setup: Setup, earlier: list[Ask]) -> Ask:
    """Mostly greedy and long enough to cross a boundary or two; often what an earlier one asked, another way."""
    if rng.random() < 0.2:
        return draw_aligned_ask(rng, setup)
    if earlier and rng.random() < 0.4:
        text = rng.choice(earlier)
    else:
        pieces = [Piece(rng.choice(STREAMS), draw_length(rng, setup))]
        if rng.random() < 0.3:
            pieces.append(Piece(rng.choice(STREAMS), rng.choice([1, 2, 3, 4, rng.randint(1, setup.block_tokens)])))
        turn_of = rng.choice([0, 1, 2]) if rng.random() < 0.2 else None
        text = Ask(tuple(pieces), turn_of, style=rng.choice(["greedy"] * 8 + list(STYLES)), seed=rng.randrange(2))
    stop = Stop(rng.randint(0, LONGEST_REPLY), rng.choice([0, 0, 1, 2, 5])) if rng.random() < 0.25 else None
    has_min_tokens = rng.random() < 0.1 and (stop is None or stop.num_characters == 0)
    return Ask(
        pieces=text.pieces,
        turn_of=text.turn_of,
        max_tokens=rng.choice([LONGEST_REPLY, LONGEST_REPLY, LONGEST_REPLY, rng.randint(1, LONGEST_REPLY)]),
        style=text.style,
        seed=text.seed,
        n=rng.choice([1, 1, 1, 1, 1, 2, 3]),
        logprobs=rng.random() < 0.6,
        prompt_logprobs=rng.random() < 0.07,
        stop=stop,
        min_tokens=rng.randint(1, 16) if has_min_tokens else 0,
        ignore_eos=rng.random() < 0.8,
        salt="a" if rng.random() < 0.15 else "",
        start=rng.choice([0, 0, rng.randint(0, LAST_STEP)]),
        abort_after=rng.randint(0, 25) if rng.random() < 0.15 else None,
        script=draw_script(rng),
    )


def draw_grammar(rng: random.Random, ask: Ask) -> Ask:
    """Hold a few asks to a grammar."""
    grammar = rng.choice(list(GRAMMARS)) if rng.random() < GRAMMAR_SHARE else None
    return msgspec.structs.replace(ask, grammar=grammar)


def draw_aligned_ask(rng: random.Random, setup: Setup) -> Ask:
    """Whose runs of S+1 tokens, all drafts right, end at a boundary."""
    edge = rng.randint(1, most_edges(setup)) * setup.block_tokens
    piece = Piece(rng.choice(STREAMS), max(1, edge - rng.randint(1, 3) * (setup.spec_tokens + 1)))
    return Ask((piece,), max_tokens=LONGEST_REPLY, logprobs=rng.random() < 0.5, start=rng.choice([0, 20]))


def most_edges(setup: Setup) -> int:
    """Blocks that a prompt can fill and leave room for a reply."""
    return (setup.max_model_len - LONGEST_REPLY) // setup.block_tokens


def draw_length(rng: random.Random, setup: Setup) -> int:
    """Near a multiple of B, or some way before one, or anything."""
    edge = rng.randint(1, most_edges(setup)) * setup.block_tokens
    near, before = edge + rng.choice([-1, 0, 1, 3]), edge - rng.randint(4, 14)
    return max(1, rng.choice([near, before, rng.randint(1, setup.block_tokens)]))


def draw_script(rng: random.Random) -> tuple[tuple[int, int], ...]:
    """Always as many right, mostly all; or mixed, some steps without drafts."""
    if rng.random() < 0.6:
        return ((MAX_BIAS, rng.choice([MAX_BIAS, MAX_BIAS, rng.randint(0, MAX_BIAS)])),)
    parts = []
    for _ in range(rng.randint(1, 5)):
        num_drafts = rng.choice([MAX_BIAS, MAX_BIAS, MAX_BIAS, 0, rng.randint(1, 4)])
        parts.append((num_drafts, rng.choice([num_drafts, rng.randint(0, num_drafts)])))
    return tuple(parts)
