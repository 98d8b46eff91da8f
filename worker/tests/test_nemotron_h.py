"""Nemotron-H: logits against transformers, and the same bits however a text is cut, batched, drafted or laid out."""

import json
from pathlib import Path

import pytest
import torch

import mambalign.engine
from mambalign.engine import LLM, SamplingParams
from mambalign.kernels.tolerances import tolerance
from mambalign.worker.models.nemotron_h import NemotronH
from mambalign.worker.models.registry import load_model
from mambalign.worker.tests.nemotron_checkpoints import (
    HEAD_FOLDER,
    SMALL,
    HeadOracle,
    load_oracle,
    write_checkpoint,
)
from mambalign.worker.tests.served import check_served
from mambalign.worker.tests.texts import (
    Memory,
    assert_logits_close,
    check_boundaries,
    check_every_cut,
    check_head_pieces,
    check_logits,
    check_random_schedule,
    random_ids,
    run,
    run_head,
    run_whole,
)

DEFAULT_MODEL = Path(mambalign.engine.__file__).parent / "default_model"


@pytest.fixture(scope="module", params=["default", *SMALL])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "default":
        return DEFAULT_MODEL
    return write_checkpoint(tmp_path_factory.mktemp("models") / request.param, **SMALL[request.param])


@pytest.fixture(scope="module")
def model(folder: Path) -> NemotronH:
    return load_model(folder, torch.float32, show_progress=False)


@pytest.fixture(scope="module")
def oracle(folder: Path):
    return load_oracle(folder)


def test_logits_of_prefill_chunks_and_decode_are_those_of_transformers(model, oracle) -> None:
    check_logits(model, oracle)


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_bits_do_not_depend_on_pieces_batch_or_drafts(model, layout: str) -> None:
    for seed in range(3):
        check_random_schedule(model, layout, seed, lengths=[1, 2, 3, 63, 100, 128, 129, 150])


def test_bits_with_many_rows(model) -> None:
    check_random_schedule(model, "SD", seed=7, lengths=[9, 10, 11, 12, 13, 14, 15, 16, 17, 40, 41])


def test_every_cut_of_a_prompt_gives_the_same_bits(model) -> None:
    check_every_cut(model)


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_a_boundary_state_is_the_state_after_exactly_its_tokens(model, layout: str) -> None:
    check_boundaries(model, layout)


@pytest.mark.parametrize("temporal_dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_state_is_rounded_after_every_token(model, temporal_dtype: torch.dtype) -> None:
    token_ids = random_ids(model, 30)
    whole = run_whole(model, token_ids, temporal_dtype)
    assert not torch.equal(whole, run_whole(model, token_ids))
    memory = Memory(model, "SD", temporal_dtype)
    text = memory.text(token_ids)
    pieces = []
    for stop in (1, 9, 10, 30):
        pieces.append(run(model, memory, [text], [token_ids[text.num_computed : stop]]))
        text.num_computed = stop
    assert torch.equal(torch.cat(pieces), whole)


@torch.inference_mode()
def test_the_mtp_head_is_the_published_one_in_any_pieces(folder: Path, model) -> None:
    """Hidden states of the head, fed with the target's and chained on its own, are those of plain torch."""
    ours = check_head_pieces(model)
    if not (folder / HEAD_FOLDER).is_dir():  # the model that ships
        return
    oracle, token_ids = HeadOracle(folder), random_ids(model, 60)
    hidden, embedding = run_whole(model, token_ids), model.embed(torch.tensor(token_ids))
    theirs = oracle(embedding[1:], hidden[:-1])
    assert_logits_close(ours, theirs)
    assert torch.equal(model.mtp_logits(ours).argmax(-1), model.mtp_logits(theirs).argmax(-1))
    memory = Memory(model, "SD")
    text = memory.text(token_ids)
    text.num_computed = 1
    fed_back = run_head(model, memory, text, ours, token_ids[1:])
    assert_logits_close(fed_back, oracle(embedding[1:], theirs))


def test_bfloat16_runs_and_is_close(folder: Path, oracle) -> None:
    model = load_model(folder, torch.bfloat16, show_progress=False)
    token_ids = random_ids(model, 50)
    hidden = run_whole(model, token_ids)
    with torch.inference_mode():
        ours, theirs = model.compute_logits(hidden), oracle(torch.tensor([token_ids])).logits[0]
    is_close = (ours - theirs).abs().amax(1) / theirs.abs().max() < tolerance("logits", torch.bfloat16)["atol"]
    has_experts = "moe" in model.config.layers  # where a rounded score decides, a token goes to other experts
    assert is_close.float().mean() >= (0.8 if has_experts else 1.0)
    check_random_schedule(model, "SD", seed=1, lengths=[5, 40, 61])


@pytest.mark.parametrize("name", ["experts", "latent"])
@pytest.mark.parametrize("spec_method", ["mtp", "ngram"])
def test_experts_are_served(name: str, spec_method: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / name, **SMALL[name])
    check_served(folder, load_oracle(folder), spec_method)


def test_a_vocabulary_larger_than_the_tokenizer(tmp_path: Path) -> None:
    """Ids that the tokenizer does not know become no text."""
    known = 4096
    folder = write_checkpoint(tmp_path / "large", **SMALL["odd"] | {"vocab_size": 2 * known})
    llm = LLM(str(folder), device="cpu", spec_tokens=1, cache_memory=64 << 20)
    params = SamplingParams(max_tokens=30, temperature=2.0, seed=1, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7]], params)[0].outputs
    seen = [token for token in output.token_ids if token < known]
    assert 0 < len(seen) < len(output.token_ids) == 30
    assert output.text == llm.core.tokenizer.decode(seen)


@torch.inference_mode()
def test_the_head_of_the_default_model_predicts() -> None:
    """Teacher-forced: how often the head's first draft is the target's own next token, on text the target knows."""
    from tokenizers import Tokenizer

    model = load_model(DEFAULT_MODEL, torch.float32, show_progress=False)
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    token_ids = tokenizer.encode(Path(json.__file__).read_text()[2000:8000]).ids[:400]
    hidden = run_whole(model, token_ids)
    memory = Memory(model, "SD")
    text = memory.text(token_ids)
    text.num_computed = 1
    fed_back = run_head(model, memory, text, hidden[:-1], token_ids[1:])
    drafts, targets = model.mtp_logits(fed_back).argmax(-1), model.compute_logits(hidden[1:]).argmax(-1)
    assert (drafts == targets).float().mean() > 0.6
