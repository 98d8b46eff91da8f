"""The sampler against a plain loop over the vocabulary, its noise against known numbers, and rows alone."""

import math
import random
from dataclasses import dataclass

import pytest
import torch

from mambalign.kernels.noise import gumbel_noise, position_keys, stream_key
from mambalign.kernels.sampling import NO_BEST
from mambalign.worker.sampler import Sampler, SampleRow
from mambalign.worker.sampling_params import SamplingParams

EOS = 2


@dataclass(slots=True)
class PlacedRow(SampleRow):
    position: int = 0


def row_of(position=7, choice=0, prompt=(), outputs=(), **fields):
    """`min_tokens` counts from the prompt's end, so a row with outputs stands right behind them."""
    params = SamplingParams(**{"seed": 5, **fields})
    position = len(prompt) + len(outputs) if params.min_tokens else position
    return PlacedRow(params, list(prompt), list(outputs), choice, position=position)


def sample(logits, rows, eos=(EOS,)):
    positions = torch.tensor([row.position for row in rows], device=logits.device)
    output = Sampler(eos)(logits.contiguous(), rows, positions)
    return output.token_ids.tolist(), output.logprobs.entries()


def sample_alone(logits, row):
    (token_id,), (entry,) = sample(logits.unsqueeze(0), [row])
    return token_id, entry


# The reference: one row, Python floats, no tensor operation.


def reference_noise(row, token_id):
    key = position_keys(torch.tensor(stream_key(row.params.seed, row.choice)), torch.tensor(row.position))
    return gumbel_noise(key, torch.tensor(token_id)).item()


def reference_logits(logits, row):
    params = row.params
    changed = [value + params.logit_bias.get(i, 0.0) for i, value in enumerate(logits.tolist())]
    for i in range(len(changed)):
        count = list(row.output_token_ids).count(i)
        if count or i in row.prompt_token_ids:
            factor = params.repetition_penalty
            changed[i] = changed[i] / factor if changed[i] > 0 else changed[i] * factor
        changed[i] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if len(row.output_token_ids) < params.min_tokens:
        for i in {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}:
            changed[i] = -math.inf
    return changed


def reference_support(logits, row):
    """Ids that may be drawn, best first, with their log-probabilities up to a constant."""
    params, changed = row.params, reference_logits(logits, row)
    best = max(changed)
    values = {i: (value - best) / params.temperature for i, value in enumerate(changed)}
    order = sorted(values, key=lambda i: (-values[i], i))
    order = [i for i in order if math.exp(values[i]) >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    total, mass, kept = math.fsum(math.exp(values[i]) for i in order), 0.0, []
    for i in order:
        if not kept or params.top_p >= 1.0 or mass < params.top_p * total:
            kept.append(i)
        mass += math.exp(values[i])
    return {i: values[i] for i in kept}


def reference_token(logits, row):
    if row.params.is_greedy:
        changed = reference_logits(logits, row)
        return changed.index(max(changed))
    support = reference_support(logits, row)
    return max(support, key=lambda i: (support[i] + reference_noise(row, i), -i))


def random_row(rng, vocab_size):
    def maybe(value):
        return value if rng.random() < 0.4 else None

    def ids(count):
        return [rng.randrange(vocab_size) for _ in range(count)]

    fields = {
        "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.6]),
        "top_p": maybe(rng.choice([0.0, 0.1, 0.5, 0.9, 0.999])),
        "top_k": maybe(rng.choice([-1, 1, 2, 5, vocab_size - 1, vocab_size, 3 * vocab_size])),
        "min_p": maybe(rng.choice([0.01, 0.2, 0.9, 1.0])),
        "repetition_penalty": maybe(rng.choice([0.5, 1.1, 2.0])),
        "frequency_penalty": maybe(rng.uniform(-2, 2)),
        "presence_penalty": maybe(rng.uniform(-2, 2)),
        "logit_bias": maybe({i: rng.uniform(-5, 5) for i in ids(3)}),
        "min_tokens": maybe(rng.randrange(8)),
        "stop_token_ids": maybe(ids(2)),
        "ignore_eos": rng.random() < 0.2,
        "logprobs": maybe(rng.randrange(6)),
        "seed": rng.randrange(-(2**63), 2**63),
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    return row_of(rng.randrange(10**6), rng.randrange(4), ids(rng.randrange(9)), ids(rng.randrange(9)), **fields)


def test_every_combination_of_features_against_the_loop():
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(40):
        vocab_size = rng.choice([11, 37, 300])
        logits = torch.randn(12, vocab_size) * rng.choice([0.1, 1.0, 4.0])
        rows = [random_row(rng, vocab_size) for _ in range(12)]
        got = sample(logits, rows)[0]
        assert got == [reference_token(logits[i], row) for i, row in enumerate(rows)]


@pytest.mark.parametrize("top_k", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("top_p", [0.0, 0.35, 0.8, 1.0])
def test_ties_are_kept_from_the_lowest_id_on(top_k, top_p):
    logits = torch.tensor([1.0, 2.0, -0.0, 2.0, 0.0, 1.0, 2.0, 1.0])
    allowed = set(reference_support(logits, row_of(top_k=top_k, top_p=top_p)))
    rows = [row_of(position, top_k=top_k, top_p=top_p) for position in range(600)]
    drawn = sample(logits.expand(600, -1), rows, [])[0]
    assert set(drawn) == allowed
    assert sample_alone(logits, row_of(temperature=0.0, logprobs=0))[0] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 6},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    ],
)
def test_draws_follow_the_filtered_softmax(fields):
    """Chi-square over 10,000 positions of one fixed seed; the limit is its 1 - 1e-6 quantile or beyond."""
    torch.manual_seed(2)
    num_draws, logits = 10_000, torch.randn(24) * 1.5
    rows = [row_of(position, **fields) for position in range(num_draws)]
    drawn = torch.tensor(sample(logits.expand(num_draws, -1), rows, [])[0])
    support = reference_support(logits, rows[0])
    total = math.fsum(math.exp(value) for value in support.values())
    observed = torch.bincount(drawn, minlength=24).tolist()
    assert sum(observed[i] for i in support) == num_draws
    expected = {i: num_draws * math.exp(value) / total for i, value in support.items()}
    statistic = sum((observed[i] - count) ** 2 / count for i, count in expected.items())
    degrees = len(support) - 1
    assert statistic < degrees + 7 * math.sqrt(2 * degrees) + 14


@pytest.mark.parametrize("vocab_size", [31, 1003, 4096])
def test_a_row_does_not_see_its_neighbours(vocab_size):
    rng = random.Random(vocab_size)
    torch.manual_seed(vocab_size)
    logits = torch.randn(33, vocab_size) * torch.logspace(-1, 1, 33).unsqueeze(1)
    rows = [random_row(rng, vocab_size) for _ in range(33)]
    token_ids, logprobs = sample(logits, rows)
    alone = [sample_alone(logits[i].clone(), row) for i, row in enumerate(rows)]
    assert token_ids == [token_id for token_id, _ in alone]
    assert logprobs == [entry for _, entry in alone]
    order = rng.sample(range(33), 33)
    permuted = sample(logits[order], [rows[i] for i in order])
    assert permuted[0] == [token_ids[i] for i in order]
    assert permuted[1] == [logprobs[i] for i in order]
    assert sum(entry is not None for entry in logprobs) > 5


def test_logprobs_are_of_the_unmodified_logits():
    torch.manual_seed(4)
    logits = torch.randn(500) * 3
    expected = logits.double().log_softmax(dim=-1)
    token_id, entry = sample_alone(
        logits, row_of(temperature=0.0, logprobs=4, logit_bias={77: 100.0}, repetition_penalty=1.3, prompt=[3])
    )
    assert token_id == 77
    assert entry.logprob == pytest.approx(expected[77].item(), abs=1e-5)
    assert entry.top_ids == expected.topk(4).indices.tolist()
    assert entry.top_logprobs == pytest.approx(expected.topk(4).values.tolist(), abs=1e-5)
    assert sample_alone(logits, row_of(temperature=0.0, logprobs=0))[1].top_ids == []
    tied = sample_alone(torch.tensor([0.0, 1.0, 1.0, 0.0]), row_of(temperature=0.0, logprobs=3))[1]
    assert tied.top_ids == [1, 2, 0]


def test_logits_are_left_as_they_came():
    logits = torch.randn(3, 40)
    before = logits.clone()
    fields = {"logit_bias": {1: 3.0}, "min_tokens": 4, "frequency_penalty": 1.0, "logprobs": 2, "top_p": 0.5}
    sample(logits, [row_of(prompt=[4], outputs=[5], **fields)] * 3)
    assert torch.equal(logits, before)


def test_plain_greedy_rows_take_the_first_maximum():
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0], [-5.0, -4.0, -3.0]])
    assert sample(logits, [row_of(temperature=0.0)] * 3) == ([1, 0, 2], [None, None, None])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0.0, "logit_bias": {1: -100.0}},
        {"temperature": 0.7, "repetition_penalty": 1.5},
        {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": [1]},
    ],
)
def test_a_row_that_is_not_of_numbers_has_no_token_and_hurts_no_other(fields):
    """What is wrong may lie where a penalty would make it finite, or a mask hide it."""
    torch.manual_seed(5)
    logits = torch.randn(7, 12)
    row = row_of(prompt=[1], logprobs=2, **fields)
    want = sample(logits, [row] * 7)
    logits[1], logits[3] = math.nan, -math.inf
    logits[5, 1], logits[6, 1] = math.inf, math.nan
    tokens, entries = sample(logits, [row] * 7)
    assert [tokens[i] for i in (1, 3, 5, 6)] == [NO_BEST.value] * 4
    assert all(math.isnan(entries[i].logprob) for i in (1, 3, 5, 6))
    assert [(tokens[i], entries[i]) for i in (0, 2, 4)] == [(want[0][i], want[1][i]) for i in (0, 2, 4)]


def test_min_tokens_masks_ends_until_enough_tokens_are_out():
    logits = torch.tensor([0.0, 1.0, 9.0, 8.0, 2.0])
    fields = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [3]}
    assert sample_alone(logits, row_of(outputs=[0], **fields))[0] == 4
    assert sample_alone(logits, row_of(outputs=[0, 0], **fields))[0] == EOS
    assert sample_alone(logits, row_of(outputs=[0], ignore_eos=True, **fields))[0] == EOS
    nothing_left = {"temperature": 1.0, "min_tokens": 2, "stop_token_ids": [0, 1, 3, 4]}
    assert sample_alone(logits, row_of(**nothing_left))[0] in range(5)


@pytest.mark.parametrize("fields", [{"temperature": 1e-5}, {"temperature": 1000.0}, {"repetition_penalty": 1e-300}])
def test_extreme_values_stay_inside_the_vocabulary(fields):
    logits = torch.linspace(-50, 50, 20)
    row = row_of(prompt=range(20), min_tokens=3, stop_token_ids=[19], **fields)
    token_id, _ = sample_alone(logits, row)
    assert token_id in range(19) and token_id != EOS


def test_a_run_of_drafts_equals_tokens_one_at_a_time():
    torch.manual_seed(6)
    logits = torch.randn(4, 50) * 2
    fields = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.4, "min_tokens": 3}
    outputs, singly = [9], []
    for j in range(4):
        row = row_of(20 + j, prompt=[1, 2], outputs=[*outputs, *singly], logprobs=1, **fields)
        singly.append(sample_alone(logits[j], row)[0])
    run = [row_of(20 + j, prompt=[1, 2], outputs=[*outputs, *singly[:j]], logprobs=1, **fields) for j in range(4)]
    assert sample(logits, run)[0] == singly


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="logits must be"):
        sample(torch.zeros(2, 5, dtype=torch.bfloat16), [row_of()] * 2)
    with pytest.raises(ValueError, match="2 rows of logits and 1 positions for 1"):
        sample(torch.zeros(2, 5), [row_of()])
    with pytest.raises(ValueError, match="seed"):
        sample(torch.zeros(1, 5), [row_of(seed=None)])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cpu_and_gpu_draw_the_same_tokens():
    rng = random.Random(8)
    logits = torch.randn(33, 1003) * 2
    rows = [random_row(rng, 1003) for _ in range(33)]
    assert sample(logits.cuda(), rows)[0] == sample(logits, rows)[0]
