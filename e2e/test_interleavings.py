"""Lives that cross: results that come late, ids, slots and blocks that change hands with a step in flight.

Every text, with its log-probabilities, is what the reference engine gives to that request alone.
"""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from cells import Cell, Pools, cell_params
from late_engine import LateEngine, Life
from oracle import Oracle

from mambalign.engine.reference import Generation
from mambalign.engine.request import Request
from mambalign.worker.input_batch import InputBatch
from mambalign.worker.sampling_params import SamplingParams

NUM_TOKENS = 48
KINDS = (("v2", "DS", 3), ("v1", "DS", 3), ("v2", "SD", 1), ("v2", "SD", 7), ("v1", "SD", 1))
CELLS = cell_params([Cell(*kind, "mtp", 16, 16, 96, 4) for kind in KINDS], num_default=2)
V2_CELLS = [cell for cell in CELLS if cell.values[0].runner == "v2"]


@dataclass
class Expect:
    """Prompts of odd lengths, and what each request must get; computed once."""

    oracle: Oracle
    _known: dict[str, Generation] = field(default_factory=dict)

    def prompt(self, i: int) -> list[int]:
        return self.oracle.source("dataclasses")[i * 50 : i * 50 + (40, 15, 21, 33, 16, 9)[i]]

    def text(self, prompt: list[int], params: SamplingParams) -> Generation:
        key = f"{prompt} {params}"
        if key not in self._known:
            self._known[key] = self.oracle.reference.generate(prompt, params)
        return self._known[key]

    def greedy(self, prompt: list[int], num_tokens: int) -> Generation:
        whole = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=3, seed=0)
        text = self.text(prompt, whole)
        return Generation(text.token_ids[:num_tokens], text.logprobs[:num_tokens], "length")

    def check(self, life: Life) -> None:
        """A life that ended by itself is the reference's; one that was aborted, the beginning of it."""
        params = life.params
        plain = not (params.changes_logits or params.stop_token_ids) and params.is_greedy
        if plain:
            num_tokens = params.max_tokens if life.finish_reason == "length" else len(life.token_ids)
            wanted = self.greedy(life.prompt, num_tokens)
        else:
            wanted = self.text(life.prompt, params)
            assert life.finish_reason == wanted.finish_reason
        assert life.token_ids == wanted.token_ids
        assert life.logprobs == wanted.logprobs


@pytest.fixture(scope="module")
def expect(oracle: Oracle) -> Expect:
    return Expect(oracle)


def open_engine(cell: Cell, pools: str | Pools = "roomy") -> LateEngine:
    return LateEngine(cell, cell.pools(pools) if isinstance(pools, str) else pools)


def count_compactions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests of V1 that left from before the last row."""
    moved, remove = [], InputBatch.remove

    def counted(batch: InputBatch, request_id: str) -> None:
        if batch.row_of[request_id] != batch.num_reqs - 1:
            moved.append(request_id)
        remove(batch, request_id)

    monkeypatch.setattr(InputBatch, "remove", counted)
    return moved


@pytest.mark.parametrize("cell", CELLS)
def test_neighbours_come_and_go_at_every_moment(expect: Expect, monkeypatch: pytest.MonkeyPatch, cell: Cell) -> None:
    compactions = count_compactions(monkeypatch)
    engine, names, lengths = open_engine(cell), itertools.count(), itertools.cycle([1, 2, 5, 3, 8, 4, 1, 7])
    watched = engine.add("watched", expect.prompt(0), max_tokens=NUM_TOKENS)
    neighbours: list[Life] = []

    def refill() -> None:
        while sum(bool(lives) for lives in engine.lives.values()) < 4 and watched.finish_reason is None:
            i = next(names)
            neighbours.append(engine.add(f"n{i}", expect.prompt(1 + i % 5), max_tokens=next(lengths)))

    engine.run(refill)
    for life in (watched, *neighbours):
        assert life.finish_reason == "length"
        expect.check(life)
    assert len(neighbours) >= 12 and engine.core.stats().num_preemptions_total == 0
    if cell.runner == "v1":
        assert len(compactions) >= 5 and not any(flying for _, flying in engine.runner.launches)
    else:
        assert sum(bool(flying) for _, flying in engine.runner.launches) >= 12
        assert engine.core.stats().fused_copy_copies[str(cell.spec_tokens)] > 0  # all drafts taken, then a move


@pytest.mark.parametrize("cell", V2_CELLS)
def test_id_and_slot_of_an_aborted_request_are_used_again_at_once(expect: Expect, cell: Cell) -> None:
    engine, lives = open_engine(cell), []
    for num_steps in range(1, 11):
        neighbour = engine.add("neighbour", expect.prompt(2), max_tokens=30)
        first = engine.add("x", expect.prompt(0), max_tokens=NUM_TOKENS)
        for _ in range(num_steps):
            engine.step()
        assert engine.is_in_flight("x")
        num_discarded, slot = engine.num_discarded, engine.runner.batch.slot_of.get("x")
        engine.core.abort("x")
        second = engine.add("x", expect.prompt(1 + num_steps % 5), max_tokens=12)
        engine.step()
        engine.step()  # the first step of its life has run
        assert slot in (None, engine.runner.batch.slot_of["x"])  # None: the aborted one had not run at all
        engine.run()
        assert engine.num_discarded > num_discarded
        assert (first.finish_reason, second.finish_reason) == ("abort", "length")
        lives += [neighbour, first, second]
    for life in lives:
        expect.check(life)
    assert {len(life.token_ids) > 0 for life in lives[1::3]} == {False, True}


@pytest.mark.parametrize("cell", CELLS)
def test_preempted_again_and_again(expect: Expect, monkeypatch: pytest.MonkeyPatch, cell: Cell) -> None:
    """Three that grow where one fits: the youngest goes, and comes back, between steps that are all booked."""
    num_states = 3 * (cell.spec_tokens + 6)
    pools = Pools("tiny", num_states, -(-(96 + 3 * cell.spec_tokens) // 16), max_model_len=96)
    engine = open_engine(cell, pools)
    scheduler, victims = engine.core.scheduler, []
    preempt = scheduler._preempt

    def counted(request: Request) -> None:
        assert not engine.runner.in_flight and not request.in_flight
        victims.append(request.request_id)
        preempt(request)

    monkeypatch.setattr(scheduler, "_preempt", counted)
    lives = [engine.add(str(i), expect.prompt(i % 6), max_tokens=NUM_TOKENS) for i in range(6)]
    engine.run()
    for life in lives:
        assert life.finish_reason == "length"
        expect.check(life)
    assert max(victims.count(name) for name in victims) >= 2
    assert engine.core.stats().num_preemptions_total == len(victims)


@pytest.mark.parametrize("cell", CELLS)
def test_reset_between_every_two_steps(expect: Expect, cell: Cell) -> None:
    engine, resets = open_engine(cell), []
    lives = [engine.add(f"a{i}", expect.prompt(i), max_tokens=24) for i in range(6)]
    lives += [engine.add(f"b{i}", expect.prompt(i), max_tokens=24) for i in range(6)]
    engine.run(lambda: resets.append(engine.core.reset_prefix_cache()))
    assert len(resets) >= 20 and resets.count(True) <= 2  # only where nobody runs
    for life in lives:
        expect.check(life)
        assert life.num_cached_tokens == 0
    repeated = engine.add("c", expect.prompt(0), max_tokens=24)
    engine.run()
    again = engine.add("d", expect.prompt(0), max_tokens=24)
    engine.run()
    expect.check(repeated)
    expect.check(again)
    assert (repeated.num_cached_tokens, again.num_cached_tokens) == (0, cell.cached(40))


def first_uses(token_ids: list[int]) -> list[int]:
    """Positions where a token is seen for the first time: as stop tokens, they end the text there."""
    return [i for i, token in enumerate(token_ids) if token not in token_ids[:i]]


@pytest.mark.parametrize("cell", CELLS)
def test_a_stop_found_late_discards_the_step_in_flight(expect: Expect, cell: Cell) -> None:
    engine, lives = open_engine(cell), []
    for i in range(3):
        text = expect.greedy(expect.prompt(i), NUM_TOKENS).token_ids
        for at in [at for at in first_uses(text) if at >= 1][:6]:
            stops = [text[at]]
            life = engine.add(f"{i}-{at}", expect.prompt(i), max_tokens=NUM_TOKENS, stop_token_ids=stops)
            lives.append((life, text[: at + 1], "stop"))
    lives += [
        (engine.add(f"length-{n}", expect.prompt(3), max_tokens=n), None, "length") for n in (1, 2, 3, 4, 5, 6, 7, 9)
    ]
    engine.run()
    for life, token_ids, reason in lives:
        assert life.finish_reason == reason
        wanted = expect.greedy(life.prompt, len(token_ids) if token_ids else life.params.max_tokens)
        assert (life.token_ids, life.logprobs) == (wanted.token_ids, wanted.logprobs)
    assert engine.core.stats().generation_tokens_total == sum(len(life.token_ids) for life, *_ in lives)
    assert engine.num_discarded >= 9 if cell.runner == "v2" else engine.num_discarded == 0


@pytest.mark.parametrize("cell", V2_CELLS)
def test_a_stop_string_found_late(expect: Expect, cell: Cell) -> None:
    engine, decode = open_engine(cell), expect.oracle.tokenizer.decode
    for i in range(4):
        token_ids = expect.greedy(expect.prompt(i), NUM_TOKENS).token_ids
        whole = decode(token_ids)
        stop = whole[10:13]
        life = engine.add("s", expect.prompt(i), max_tokens=NUM_TOKENS, stop=[stop])
        other = engine.add("other", expect.prompt(4), max_tokens=20)
        engine.run()
        assert life.text == whole[: whole.index(stop)] and life.finish_reason == "stop"
        assert life.token_ids == token_ids[: len(life.token_ids)] and stop in decode(life.token_ids)
        assert stop not in decode(life.token_ids[:-1])
        expect.check(other)
    assert engine.num_discarded >= 2


@pytest.mark.parametrize("cell", V2_CELLS)
def test_blocks_of_an_ended_request_are_used_again_with_a_step_in_flight(expect: Expect, cell: Cell) -> None:
    """Every request ends by a stop found late; who comes next takes its blocks at once, filled with NaN."""
    engine, names = open_engine(cell), itertools.count()
    watched = engine.add("watched", expect.prompt(0), max_tokens=NUM_TOKENS)
    lives: list[tuple[Life, list[int]]] = []

    def refill() -> None:
        while sum(bool(each) for each in engine.lives.values()) < 4 and watched.finish_reason is None:
            i = next(names)
            prompt = expect.prompt(1 + i % 5)
            text = expect.greedy(prompt, NUM_TOKENS).token_ids
            at = first_uses(text)[1 + i % 3]
            stops = [text[at]]
            lives.append((engine.add(f"n{i}", prompt, max_tokens=NUM_TOKENS, stop_token_ids=stops), text[: at + 1]))

    engine.run(refill)
    expect.check(watched)
    for life, token_ids in lives:
        assert life.finish_reason == "stop" and life.token_ids == token_ids
    assert engine.num_reused >= 5


HISTORIES: list[Callable[[list[int]], dict]] = [
    lambda text: {"repetition_penalty": 1.4},
    lambda text: {"presence_penalty": 1.0, "frequency_penalty": 0.7, "temperature": 0.9, "seed": 3},
    lambda text: {"min_tokens": 12, "stop_token_ids": text[2:4]},
    lambda text: {"temperature": 0.8, "seed": 5, "top_p": 0.9},
    lambda text: {"logit_bias": {text[0]: -100.0}},
    lambda text: {},
]


@pytest.mark.parametrize("cell", V2_CELLS)
def test_rows_that_wait_for_the_host_beside_rows_that_do_not(expect: Expect, cell: Cell) -> None:
    by_runner: dict[str, list[Life]] = {}
    for runner in ("v1", "v2"):
        engine = open_engine(dataclasses.replace(cell, runner=runner, max_num_seqs=6))
        lives = by_runner[runner] = []
        for i, make in enumerate(HISTORIES):
            text = expect.greedy(expect.prompt(i), 4).token_ids
            lives.append(engine.add(str(i), expect.prompt(i), max_tokens=24, **make(text)))
        engine.run()
        launches = engine.runner.launches
    for one, other in zip(by_runner["v1"], by_runner["v2"], strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprobs == other.logprobs
        expect.check(other)
    ahead: set[str] = set()  # decoded over a decode step in flight
    for rows, flying in launches:
        in_flight = {row.request_id for row in flying if row.is_decode}
        ahead |= {row.request_id for row in rows if row.is_decode} & in_flight
    assert ahead == {"2", "3", "4", "5"}
    assert len(by_runner["v2"][2].token_ids) >= 12
