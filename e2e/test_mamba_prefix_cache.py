"""State migration step by step on the real engine: what each step schedules, holds and copies, for scripted drafts.

Tables are written by hand from the design's rules; sweeps compare with those rules played out in plain loops. In all of
them the text is the oracle's, bit for bit, and every state in the cache equals one that a prefill of exactly that many
tokens leaves.
"""

from collections.abc import Iterator, Sequence

import pytest
from cells import LAYOUTS, RUNNERS
from oracle import Oracle
from scripted_engine import Copy, Drafts, ScriptedEngine, Step

HEADER_TOKENS = 16  # this close before a prompt's end, the boundary before the last is kept as well
LONGEST_SCRIPT = 17  # tokens


def make_engine(oracle: Oracle, runner: str, layout: str, spec_tokens: int, block_tokens: int) -> ScriptedEngine:
    return ScriptedEngine(
        oracle,
        runner=runner,
        mamba_conv_layout=layout,
        spec_tokens=spec_tokens,
        mamba_block_size=block_tokens,
        kv_block_size=block_tokens // 2,
        max_num_seqs=8,
        max_model_len=128,
        cache_memory="96MiB",
        mamba_cache_fraction=0.8,
    )


# Sweeps run over each runner and each layout once, and over every pair with --all.
PAIRS = [(runner, layout) for runner in RUNNERS for layout in LAYOUTS]
FEW_PAIRS = [
    pytest.param(
        pair, id="-".join(pair), marks=[] if RUNNERS.index(pair[0]) == LAYOUTS.index(pair[1]) else pytest.mark.slow
    )
    for pair in PAIRS
]
in_few_pairs = pytest.mark.parametrize("engine", FEW_PAIRS, indirect=True)


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def engine(request: pytest.FixtureRequest, oracle: Oracle) -> Iterator[ScriptedEngine]:
    """B = 8 and S = 3."""
    engine = make_engine(oracle, *request.param, spec_tokens=3, block_tokens=8)
    yield engine
    engine.client.close()


def keep(engine: ScriptedEngine, *num_kept: int) -> list[Drafts]:
    """Full drafts, of which each step keeps so many tokens, its own included."""
    return [Drafts(engine.core.spec_tokens, kept - 1) for kept in num_kept]


def is_v1(engine: ScriptedEngine) -> bool:
    return engine.core.config.runner.runner == "v1"


def num_tokens(engine: ScriptedEngine) -> int:
    """Of each text: V2 drafts less where the text could end within two steps."""
    return LONGEST_SCRIPT + 2 * (engine.core.spec_tokens + 1)


def prompt_of(engine: ScriptedEngine, length: int) -> list[int]:
    return engine.oracle.prompt("shlex", length, num_tokens(engine) + engine.core.spec_tokens + 1)


def assert_steps(engine: ScriptedEngine, prompt: list[int], expected: Sequence[Step]) -> None:
    """V2 reserves columns for the furthest place that the step in flight may bring a row to."""
    found = engine.steps[tuple(prompt)][: len(expected)]
    for i, (step, wanted) in enumerate(zip(found, expected, strict=True)):
        same = (step.n, step.q) == (wanted.n, wanted.q) and wanted.before in step.before and wanted.after in step.after
        extra = set(step.held) ^ set(wanted.held)
        may_differ = not is_v1(engine) and set(wanted.held) <= set(step.held) and len(extra) <= 4
        assert same and (not extra or may_differ), f"step {i}: {step}, must be {wanted}"


def assert_cached_states(engine: ScriptedEngine, prompt: list[int], boundaries: Sequence[int]) -> None:
    """The cache holds these boundaries of the text, each as a prefill of exactly so many tokens leaves it."""
    text = prompt + engine.oracle.expected(prompt, num_tokens(engine)).token_ids
    states = {m: engine.cached_state(text[:m]) for m in boundaries}
    assert None not in states.values(), f"cached: {[m for m in states if states[m]]} of {list(boundaries)}"
    for m, state in states.items():
        wanted = prefill_state(engine, text[:m])
        assert all(map(lambda a, b: a.equal(b), state, wanted)), f"state after {m} tokens"


_prefill_states: dict[tuple, list] = {}


def prefill_state(engine: ScriptedEngine, token_ids: list[int]) -> list:
    key = (engine.cache.conv_layout, *token_ids)
    if key not in _prefill_states:
        engine.run([token_ids], [[]], 1)
        _prefill_states[key] = engine.cached_state(token_ids)
    return _prefill_states[key]


# By hand: B = 8, S = 3. Columns are held from floor(n / 8) to the running column + 3.

TABLES: dict[str, tuple[int, tuple[int, ...], list[Step]]] = {
    # One token a step. The step at 5 reaches token 9 with its drafts: it runs in column 1 from then on, and the state
    # after token 8, in column 1 + 0 of the step at 7, goes back to column 0.
    "bias 0": (
        4,
        (1, 1, 1, 1, 1),
        [
            Step(0, 4, [0]),
            Step(4, 4, [0, 1, 2, 3]),
            Step(5, 4, [0, 1, 2, 3, 4], before=Copy(0, 1)),
            Step(6, 4, [0, 1, 2, 3, 4]),
            Step(7, 4, [0, 1, 2, 3, 4], after=Copy(1, 0)),
            Step(8, 4, [1, 2, 3, 4]),
        ],
    ),
    # Two kept before the crossing: the temporal source, column 0 + 1, is the destination; only conv moves.
    "bias 1": (
        3,
        (2, 1, 4),
        [
            Step(0, 3, [0]),
            Step(3, 4, [0, 1, 2, 3]),
            Step(5, 4, [0, 1, 2, 3, 4]),
            Step(6, 4, [0, 1, 2, 3, 4], after=Copy(2, 0)),
        ],
    ),
    # Three kept, then one that ends past the boundary: the state after token 8 is draft 1's, in column 1 + 1.
    "bias 2": (
        3,
        (3, 4, 1),
        [
            Step(0, 3, [0]),
            Step(3, 4, [0, 1, 2, 3]),
            Step(6, 4, [0, 1, 2, 3, 4], before=Copy(2, 1), after=Copy(2, 0)),
            Step(10, 4, [1, 2, 3, 4]),
        ],
    ),
    # Everything kept each time. The step at 8 begins on the boundary, which the step at 4 ended on.
    "bias 3": (
        4,
        (4, 4, 4, 4),
        [
            Step(0, 4, [0]),
            Step(4, 4, [0, 1, 2, 3], after=Copy(3, 0)),
            Step(8, 4, [0, 1, 2, 3, 4], before=Copy(0, 1)),
            Step(12, 4, [1, 2, 3, 4], after=Copy(4, 1)),
            Step(16, 4, [1, 2, 3, 4, 5], before=Copy(1, 2)),
        ],
    ),
    # A prompt of exactly two blocks: its state is published, and the first decode step leaves that column.
    "prompt of 2B": (
        16,
        (3, 2),
        [
            Step(0, 16, [0, 1]),
            Step(16, 4, [1, 2, 3, 4, 5], before=Copy(1, 2)),
            Step(19, 4, [2, 3, 4, 5]),
        ],
    ),
    # Ends at m - 1, m + 1 and m in turn.
    "around m": (
        5,
        (2, 2, 3, 4, 1),
        [
            Step(0, 5, [0]),
            Step(5, 4, [0, 1, 2, 3, 4], before=Copy(0, 1)),
            Step(7, 4, [0, 1, 2, 3, 4], after=Copy(1, 0)),
            Step(9, 4, [1, 2, 3, 4]),
            Step(12, 4, [1, 2, 3, 4], after=Copy(4, 1)),
            Step(16, 4, [1, 2, 3, 4, 5], before=Copy(1, 2)),
        ],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_table(engine: ScriptedEngine, name: str) -> None:
    num_prompt_tokens, num_kept, steps = TABLES[name]
    prompt = prompt_of(engine, num_prompt_tokens)
    engine.run([prompt], [keep(engine, *num_kept)], num_tokens(engine))
    assert_steps(engine, prompt, steps)
    assert_cached_states(engine, prompt, range(8, num_prompt_tokens + num_tokens(engine), 8))


def test_a_step_without_drafts_runs_where_rejected_drafts_had_led(engine: ScriptedEngine) -> None:
    """n = m - 2, q = 4, one kept; then q = 1: the running column stays one past the token's own."""
    prompt = prompt_of(engine, 6)
    engine.run([prompt], [[Drafts(3, 0), Drafts(0, 0), Drafts(0, 0), Drafts(3, 3)]], num_tokens(engine))
    if is_v1(engine):  # V2 runs as many tokens in every step
        expected = [
            Step(0, 6, [0]),
            Step(6, 4, [0, 1, 2, 3, 4], before=Copy(0, 1)),
            Step(7, 1, [0, 1, 2, 3, 4], after=Copy(1, 0)),
            Step(8, 1, [1, 2, 3, 4]),
            Step(9, 4, [1, 2, 3, 4]),
        ]
        assert_steps(engine, prompt, expected)
    assert_cached_states(engine, prompt, range(8, 6 + num_tokens(engine), 8))


# By rule.


def play(num_prompt_tokens: int, script: Sequence[Drafts], block_tokens: int, spec_tokens: int) -> list[Step]:
    """The steps of a request alone, from an empty cache, by the design's rules."""
    size, n, c, a = block_tokens, num_prompt_tokens, -(-num_prompt_tokens // block_tokens) - 1, 1
    last = n // size * size
    asked = {last, last - size} if n - last < HEADER_TOKENS else {last}
    held = {c, *(m // size - 1 for m in asked if m > 0)}
    steps = [Step(0, n, sorted(held))]
    for num_drafts, num_right in script:
        held = {k for k in held if k >= n // size or k == c}
        q, kept = 1 + num_drafts, 1 + num_right
        to = max(c, -(-(n + q) // size) - 1)
        held |= set(range(n // size, to + spec_tokens + 1))
        before = Copy(c + a - 1, to) if to not in (c, c + a - 1) else None
        a = 1 if to != c else a
        c, m, end = to, (n + kept) // size * size, n + kept
        source, dest = c + m - n - 1, m // size - 1
        after = Copy(source, dest) if m > n and source != dest else None
        steps.append(Step(n, q, sorted(held), before, after))
        n, a = end, 1 if m > n and dest == c else kept
    return steps


def scripts_around_a_boundary(spec_tokens: int, block_tokens: int) -> list[tuple[int, list[int]]]:
    """(prompt length, tokens kept a step): first runs of 1..S+1 tokens that end before, on and past a boundary."""
    found = []
    for distance in range(spec_tokens + 2):  # from the prompt's end to the boundary
        for first in range(1, spec_tokens + 2):
            if spec_tokens <= 3 or abs(distance - first) <= 1:
                more = [2, spec_tokens + 1] if spec_tokens <= 3 else []
                found.append((2 * block_tokens - distance, [first, 1 + first % (spec_tokens + 1), *more]))
    return found


def run_sweep(engine: ScriptedEngine) -> None:
    spec_tokens, size = engine.core.spec_tokens, engine.block_tokens
    biases, ends = set(), set()
    for num_prompt_tokens, num_kept in scripts_around_a_boundary(spec_tokens, size):
        prompt, script = prompt_of(engine, num_prompt_tokens), keep(engine, *num_kept)
        engine.run([prompt], [script], num_tokens(engine))
        steps = play(num_prompt_tokens, script, size, spec_tokens)
        assert_steps(engine, prompt, steps)
        boundaries = range(size, num_prompt_tokens + num_tokens(engine), size)
        for step, kept in zip(steps[1:], num_kept, strict=True):
            biases |= {step.before.source_column - (step.before.dest_column - 1)} if step.before else set()
            ends.add(min((step.n + kept - m for m in boundaries), key=abs))
        assert_cached_states(engine, prompt, boundaries)
    assert biases >= {0, *range(2, spec_tokens + 1)}  # with 1 the temporal state lies in the new column already
    assert {-1, 0, 1} <= ends
    assert_checked(engine)


def assert_checked(engine: ScriptedEngine) -> None:
    """The fused copy was compared with the scalar path, at every bias, and never differed."""
    stats = engine.client.stats()
    assert {int(bias) for bias in stats.fused_copy_copies} == set(range(engine.core.spec_tokens + 1))
    assert stats.fused_copy_mismatches_total == 0


@in_few_pairs
def test_every_bias_at_a_boundary(engine: ScriptedEngine) -> None:
    run_sweep(engine)


@pytest.mark.parametrize(("runner", "layout"), [("v2", "SD"), pytest.param("v1", "DS", marks=pytest.mark.slow)])
def test_as_many_drafts_as_a_block_allows(oracle: Oracle, runner: str, layout: str) -> None:
    """S + 1 = B."""
    engine = make_engine(oracle, runner, layout, spec_tokens=7, block_tokens=8)
    run_sweep(engine)
    engine.client.close()


ALTERNATING = {
    "none, all": [Drafts(0, 0), Drafts(3, 3)] * 5,
    "all, none": [Drafts(3, 3), Drafts(0, 0)] * 5,
    "rejected, none": [Drafts(3, 0), Drafts(0, 0)] * 8,
    "fewer and fewer": [Drafts(3, 2), Drafts(2, 2), Drafts(1, 0), Drafts(0, 0), Drafts(1, 1), Drafts(2, 0)] * 2,
}


@in_few_pairs
@pytest.mark.parametrize("name", ALTERNATING)
def test_alternating(engine: ScriptedEngine, name: str) -> None:
    """Steps with and without drafts, beginning at every distance from a boundary."""
    script = ALTERNATING[name]
    for distance in range(6):
        prompt = prompt_of(engine, 16 - distance)
        engine.run([prompt], [script], num_tokens(engine))
        if is_v1(engine):
            assert_steps(engine, prompt, play(len(prompt), script[:5], 8, 3))
        assert_cached_states(engine, prompt, range(8, len(prompt) + num_tokens(engine), 8))


@in_few_pairs
def test_all_scripts_in_one_batch(engine: ScriptedEngine) -> None:
    """Rows with drafts, without, and of every kept count side by side; more requests than rows."""
    scripts = [*ALTERNATING.values(), *(keep(engine, *[k] * num_tokens(engine)) for k in (1, 2, 3, 4)), []]
    prompts = [prompt_of(engine, 16 - i) for i in range(len(scripts))]
    engine.run(prompts, scripts, num_tokens(engine))
    for prompt in prompts:
        assert_cached_states_exist(engine, prompt)
    assert_checked(engine)


def assert_cached_states_exist(engine: ScriptedEngine, prompt: list[int]) -> None:
    text = prompt + engine.oracle.expected(prompt, num_tokens(engine)).token_ids
    for m in range(8, len(text) - 1, 8):
        assert engine.cached_state(text[:m]) is not None, f"state after {m} tokens of a prompt of {len(prompt)}"
