"""The scheduler's edges, each under its name, on top of the symbolic runner that checks every state on the way."""

import random
from dataclasses import replace

import pytest

from mambalign.engine.request import Request, RequestStatus
from mambalign.engine.scheduler_limits import SchedulerLimits
from mambalign.engine.tests.symbolic_engine import VOCAB_SIZE, SymbolicEngine
from mambalign.worker.mamba_columns import cdiv
from mambalign.worker.sampling_params import SamplingParams
from mambalign.worker.tests.symbolic_memory import true_text

BLOCK = 8
LIMITS = SchedulerLimits(
    max_num_seqs=4,
    max_num_batched_tokens=200,
    max_model_len=200,
    num_spec_tokens=3,
    kv_block_tokens=4,
    mamba_block_tokens=BLOCK,
    num_kv_blocks=400,
    num_mamba_blocks=200,
    enable_prefix_caching=True,
    num_lookahead_tokens=3,
)


def make_engine(drafts: tuple[int, int] | None = None, **changes: int | bool) -> SymbolicEngine:
    """`drafts`: how many every row gets each time, and how many are right; default: all, and all right."""
    limits = replace(LIMITS, **changes)
    plan = (limits.num_spec_tokens, limits.num_spec_tokens) if drafts is None else drafts
    return SymbolicEngine(limits, lambda request_id, num_tokens: plan)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def finish(engine: SymbolicEngine) -> None:
    engine.run()
    engine.check_idle()


# the hit law


@pytest.mark.parametrize("spec", [0, 1, 3, 7])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 63, 64, 65])
def test_a_repeated_prompt_hits_its_last_boundary(num_tokens: int, spec: int) -> None:
    engine = make_engine(num_spec_tokens=spec, num_lookahead_tokens=max(1, spec))
    assert engine.generate(prompt(num_tokens), 5).num_cached_tokens == 0
    assert engine.generate(prompt(num_tokens), 5).num_cached_tokens == (num_tokens - 1) // BLOCK * BLOCK
    engine.check_idle()


@pytest.mark.parametrize("stop_after", [1, 5, 6, 7, 8, 9, 13, 14, 15])
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_text_that_goes_on_hits_its_last_decoded_boundary(stop_after: int, right: int) -> None:
    """Wherever a stop cuts a run of accepted tokens, and whatever of the run lies behind it."""
    engine = make_engine((3, right))
    first = engine.generate(prompt(10), stop_after=stop_after)
    assert first.num_output_tokens == stop_after
    num_seen = engine.runner.texts[first.request_id].num_computed_tokens
    again = engine.generate([*first.token_ids, 0], 1)
    assert again.num_cached_tokens == min(num_seen, first.num_tokens) // BLOCK * BLOCK
    engine.check_idle()


def test_drafts_behind_a_stop_are_not_cached() -> None:
    """The run of 4 crosses the boundary 16, but the text ends at 15 tokens."""
    engine = make_engine()
    first = engine.generate(prompt(12), stop_after=3)
    assert engine.runner.texts[first.request_id].num_computed_tokens == 16 and first.num_tokens == 15
    again = engine.generate(first.token_ids + prompt(9), 1)
    assert again.num_cached_tokens == 8


def test_next_chat_turn_hits_the_boundary_before_the_header() -> None:
    """Prompts end in a header that the next turn does not contain."""
    for header in range(1, 17):
        engine = make_engine(kv_block_tokens=8, mamba_block_tokens=16)
        conversation, last_header = prompt(40), [0] * header
        engine.generate(conversation + last_header, 3)
        turn = engine.generate([*conversation, 1, *prompt(20, seed=1)], 3)
        assert turn.num_cached_tokens == 32, header


@pytest.mark.parametrize("shared", [7, 8, 30, 32, 33, 39, 40, 41])
def test_a_shared_beginning_is_reused_from_its_second_sighting_on(shared: int) -> None:
    engine = make_engine()
    beginning = prompt(shared)
    endings = [[0, *prompt(40, seed=1)], [1, *prompt(40, seed=2)], [2, *prompt(40, seed=3)]]
    hits = [engine.generate(beginning + ending, 3).num_cached_tokens for ending in endings]
    assert hits == [0, 0, shared // BLOCK * BLOCK]
    engine.check_idle()


def test_a_growing_conversation_computes_each_token_once() -> None:
    engine = make_engine((3, 1))
    text = prompt(20)
    for turn in range(5):
        request = engine.generate(text, 12)
        expected = (len(text) - 1 - 9) // BLOCK * BLOCK if turn else 0
        assert request.num_cached_tokens >= expected
        text = request.token_ids + prompt(9, seed=turn)
    engine.check_idle()


def test_salts_do_not_share() -> None:
    engine = make_engine()
    engine.generate(prompt(20), 3, salt="a")
    assert engine.generate(prompt(20), 3, salt="b").num_cached_tokens == 0
    assert engine.generate(prompt(20), 3, salt="a").num_cached_tokens == 16


def test_caching_off_finds_and_leaves_nothing() -> None:
    engine = make_engine(enable_prefix_caching=False)
    for _ in range(2):
        assert engine.generate(prompt(20), 10).num_cached_tokens == 0
    blocks, counters = engine.scheduler.blocks, engine.scheduler.counters
    assert blocks.kv_pool.num_cached == blocks.mamba_pool.num_cached == counters.prefix_queries == 0
    engine.check_idle()


def test_reset_with_running_requests() -> None:
    engine = make_engine((3, 1))
    engine.generate(prompt(20), 3)
    running = [engine.add(prompt(20), 30, seed=seed) for seed in range(2)]
    for _ in range(4):
        engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.reset_prefix_cache()
    late = engine.add(prompt(20), 3)
    finish(engine)
    assert [r.num_cached_tokens for r in [*running, late]] == [16, 16, 0]
    assert engine.scheduler.reset_prefix_cache()


# one step, several requests


@pytest.mark.parametrize("num_tokens", [1, 16, 17])
def test_one_prefix_twice_in_one_step(num_tokens: int) -> None:
    """Neither may read what the other is writing; only one copy is cached."""
    engine = make_engine()
    twins = [engine.add(prompt(num_tokens), 10, seed=seed) for seed in range(2)]
    assert len(engine.step().rows) == 2
    assert not set(twins[0].kv_blocks) & set(twins[1].kv_blocks)
    finish(engine)
    assert [r.num_cached_tokens for r in twins] == [0, 0]


def test_choices_of_one_prompt_at_a_cold_start() -> None:
    engine = make_engine(max_num_seqs=2)
    choices = [engine.add(prompt(18), 10, choice=choice) for choice in range(4)]
    finish(engine)
    assert [r.num_cached_tokens for r in choices] == [0, 0, 16, 16]
    assert len({tuple(r.output_token_ids) for r in choices}) > 1


def test_waiting_while_all_rows_are_taken() -> None:
    engine = make_engine((0, 0), max_num_seqs=2)
    first, second, third = (engine.add(prompt(5, seed), 3 + 5 * seed) for seed in range(3))
    while first.status is not RequestStatus.FINISHED:
        engine.step()
        assert third.status is RequestStatus.WAITING
    engine.step()
    assert third.status is RequestStatus.RUNNING and second.status is RequestStatus.RUNNING
    finish(engine)


def test_every_row_gets_a_token_when_the_budget_is_one_each() -> None:
    """C = max_num_seqs: drafts and prompts share what is left, which is nothing, and yet all end."""
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=3)
    requests = [engine.add(prompt(6, seed), 8) for seed in range(5)]
    ended = [step for step in engine.run() if step.removed]
    assert ended and engine.num_steps < sum(r.num_tokens for r in requests)
    engine.check_idle()


def test_drafts_leave_room_for_prompts() -> None:
    """Two rows that would draft 3 each, a budget of 8: half of it is kept for the prompt that waits."""
    engine = make_engine(max_num_batched_tokens=8)
    for seed in range(2):
        engine.add(prompt(3, seed), 30)
    engine.step()
    assert sorted(row.num_tokens for row in engine.step().rows) == [4, 4]
    engine.add(prompt(20, 2), 5)
    rows = {row.request_id: row.num_tokens for row in engine.step().rows}
    assert rows["r2"] >= 4 and sum(rows.values()) == 8
    finish(engine)


def test_budget_smaller_than_a_block() -> None:
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=1)
    engine.add(prompt(25), 6)
    sizes = [row.num_tokens for step in engine.run() for row in step.rows if not row.is_decode]
    assert sizes == [4] * 6 + [1]
    assert engine.generate(prompt(25), 1).num_cached_tokens == 24
    engine.check_idle()


# the end of a text


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_drafts_are_trimmed_to_max_tokens(max_tokens: int) -> None:
    engine = make_engine()
    request = engine.generate(prompt(10), max_tokens)
    assert (request.num_output_tokens, request.finish_reason) == (max_tokens, "length")
    assert request.num_draft_tokens == request.num_accepted_tokens == max_tokens - 1 - cdiv(max_tokens - 1, 4)
    engine.check_idle()


@pytest.mark.parametrize("num_prompt_tokens", range(20, 32))
def test_drafts_are_trimmed_to_max_model_len(num_prompt_tokens: int) -> None:
    """In a pool of exactly one longest text with its look-ahead."""
    engine = make_engine(max_model_len=32, num_kv_blocks=1 + cdiv(32 + 3, 4), num_mamba_blocks=1 + 5)
    request = engine.generate(prompt(num_prompt_tokens), 1000)
    assert (request.num_tokens, request.finish_reason) == (32, "length")
    engine.check_idle()


def test_accepted_drafts_behind_a_stop_do_not_count() -> None:
    engine = make_engine()
    request = engine.generate(prompt(10), stop_after=3)  # one token, then a run of 4 cut after its second
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (3, 2)
    assert engine.scheduler.counters.accepted_per_position == [1, 1, 0]


# blocks run out


def test_the_youngest_is_preempted() -> None:
    """Three rows of 6 states each in a pool of 13."""
    engine = make_engine(num_mamba_blocks=1 + 13)
    old, middle, young = (engine.add(prompt(10, seed), 30) for seed in range(3))
    finish(engine)
    assert old.num_preemptions == middle.num_preemptions == 0 < young.num_preemptions
    assert young.num_cached_tokens == 0


def test_the_preempted_goes_before_those_that_wait() -> None:
    engine = make_engine(num_mamba_blocks=1 + 8, max_num_seqs=2)
    old, young, waiting = (engine.add(prompt(10, seed), 20) for seed in range(3))
    while not young.num_preemptions:
        engine.step()
    assert list(engine.scheduler.waiting) == [young, waiting]
    assert not young.kv_blocks and not young.mamba_blocks and not young.draft_token_ids
    while old.status is not RequestStatus.FINISHED:
        engine.step()
    finish(engine)


def test_a_resumed_request_hits_what_it_had_computed() -> None:
    """It counts its prompt and output as one prompt, and starts with one accepted token."""
    engine = make_engine((3, 3))
    request = engine.add(prompt(20), 40)
    for _ in range(4):
        engine.step()
    num_known = request.num_tokens
    engine.scheduler._preempt(request)
    engine.scheduler.check()
    step = engine.step()
    assert step.removed == [request.request_id]
    assert step.new_rows[0].num_computed_tokens == (num_known - 1) // BLOCK * BLOCK
    assert not step.rows[0].is_decode and request.num_cached_tokens == 0
    finish(engine)


def test_a_preempted_request_can_be_aborted_and_its_id_used_again() -> None:
    engine = make_engine()
    request = engine.add(prompt(20), 40)
    engine.step()
    engine.scheduler._preempt(request)
    engine.abort(request)
    again = Request(request.request_id, prompt(12), SamplingParams(max_tokens=4, seed=0))
    engine.scheduler.add_request(again)
    engine.requests.append(again)
    step = engine.step()
    assert (step.removed, [new.request_id for new in step.new_rows]) == (["r0"], ["r0"])
    while engine.scheduler.has_work():
        engine.step()
    assert again.finish_reason == "length"


def test_superseded_decode_boundaries_leave_first() -> None:
    """A reply that crosses twelve boundaries costs the others nothing.

    The pool holds four states of other prompts, one of its own prompt, its last boundary, and the 5 that it runs on.
    """
    engine = make_engine(num_mamba_blocks=1 + 4 + 1 + 1 + 5)
    others = [engine.generate(prompt(17, seed), 1).prompt_token_ids for seed in range(2)]
    engine.generate(prompt(9, 9), 100)
    assert engine.num_evictions > 8
    assert [engine.generate(other, 1).num_cached_tokens for other in others] == [16, 16]


def test_copies_that_are_computed_again_stay_young() -> None:
    """What a text shares with an older one is computed again for want of a state.

    The older copies lead to the text's own blocks: a text that came in between is evicted before them.
    """
    engine = make_engine(num_kv_blocks=1 + 10 + 10 + 11)
    beginning = prompt(28)
    engine.generate([*beginning, 0, *prompt(11, 1)], 1)
    engine.generate([1, *prompt(39, 2)], 1)  # in between
    parted = [*beginning, 1, *prompt(11, 3)]
    assert engine.generate(parted, 1).num_cached_tokens == 0 == engine.num_evictions
    engine.generate([2, *prompt(48, 4)], 1)
    assert engine.num_evictions == 5
    assert engine.generate(parted, 1).num_cached_tokens == 32


# one step ahead of the results


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 16, 17])
def test_running_ahead_changes_neither_text_nor_hits(num_tokens: int) -> None:
    engine = make_engine((3, 2), schedules_ahead=True)
    for expected in (0, (num_tokens - 1) // BLOCK * BLOCK):
        request = engine.add(prompt(num_tokens), 30)
        engine.run()
        assert request.num_cached_tokens == expected
    assert engine.num_steps_ahead > 10
    engine.check_idle()


def test_a_stop_found_late_discards_the_step_in_flight() -> None:
    engine = make_engine(schedules_ahead=True)
    request = engine.add(prompt(10), stop_after=3)
    while request.status is not RequestStatus.FINISHED:
        step = engine.step()
    assert [row.request_id for row in step.rows] == [request.request_id]  # planned before the stop was known
    finish(engine)
    assert request.num_output_tokens == 3 and request.num_draft_tokens == 3


def test_a_late_result_is_not_that_of_a_new_request_with_the_id() -> None:
    engine = make_engine(schedules_ahead=True)
    old = engine.add(prompt(10), 30)
    for _ in range(3):
        engine.step()
    engine.abort(old)
    new = Request(old.request_id, prompt(12, 1), SamplingParams(max_tokens=9, seed=0))
    engine.scheduler.add_request(new)
    engine.requests.append(new)
    engine.run()
    assert new.output_token_ids == true_text(new.prompt_token_ids, new.params, 0, VOCAB_SIZE, 9)


def test_the_last_token_is_not_planned_twice() -> None:
    """The step in flight may bring all that is left: the next one waits for it."""
    engine = make_engine(schedules_ahead=True)
    request = engine.add(prompt(10), 5)  # one token from the prompt, and a run of 4
    assert [len(engine.step().rows) for _ in range(3)] == [1, 1, 0]
    assert request.finish_reason == "length"
    finish(engine)


def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    engine = make_engine(num_mamba_blocks=1 + 8, max_num_seqs=2, schedules_ahead=True)
    requests = [engine.add(prompt(10, seed), 30) for seed in range(2)]
    while engine.has_work():
        before, in_flight = engine.scheduler.counters.preemptions, bool(engine._launched)
        engine.step()
        assert engine.scheduler.counters.preemptions == before or not in_flight
    assert requests[1].num_preemptions
    engine.check_idle()


# at the door


def test_what_can_never_run_is_refused() -> None:
    engine = make_engine(max_model_len=32)
    scheduler = engine.scheduler
    for tokens, words in (([], "at least one token"), (prompt(32), "max_model_len")):
        with pytest.raises(ValueError, match=words):
            scheduler.add_request(Request("x", tokens, SamplingParams()))
    engine.add(prompt(31), 5)
    with pytest.raises(ValueError, match="in use"):
        scheduler.add_request(Request("r0", prompt(3), SamplingParams()))
    finish(engine)


def test_one_ending_each() -> None:
    engine = make_engine()
    waiting = engine.add(prompt(5), 5)
    assert engine.scheduler.finish(waiting.request_id, "abort") is waiting
    assert engine.scheduler.finish(waiting.request_id, "abort") is None
    assert engine.scheduler.finish("never seen", "abort") is None
    assert waiting.finish_reason == "abort" and not engine.scheduler.has_work()
    engine.scheduler.check()
