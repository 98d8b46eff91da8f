"""A model whose finite weights overflow on some texts: such a request ends in an error, and hurts nothing else."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_core
import torch
from run_core import token_ids
from safetensors.torch import load_file, save_file
from server_process import ServerProcess, call

from mambalign.engine import LLM, SamplingParams
from mambalign.engine.checkpoint import DEFAULT_MODEL
from mambalign.engine.core import EngineCore
from mambalign.engine.messages import EngineOutput, EngineRequest
from mambalign.engine.reference import ReferenceEngine
from mambalign.worker.sampler import NOT_NUMBERS
from mambalign.worker.sampling_params import StructuredOutputs

pytestmark = pytest.mark.skipif(not (DEFAULT_MODEL / "config.json").exists(), reason="no model ships here")

POISON = 4000  # the token that makes the first layer overflow, and by its state all that follows
HUGE = 3e38
BLOCK = 16
OPTIONS: dict[str, Any] = {
    "spec_tokens": 3,
    "mamba_block_size": BLOCK,
    "max_model_len": 256,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 2 * BLOCK,  # prompts run in pieces
    "cache_memory": 48 << 20,
}
SOUND = {"a": list(range(100, 100 + 3 * BLOCK)), "b": list(range(300, 310))}
BAD = [*SOUND["a"][: 2 * BLOCK], *range(500, 500 + BLOCK), POISON, *range(600, 600 + 3 * BLOCK)]
WAYS = {  # of taking a token
    "greedy": {"temperature": 0.0},
    "sampled": {"top_k": 5, "top_p": 0.9},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 2},
    "of prompts": {"temperature": 0.0, "prompt_logprobs": 1},
    "grammar": {"temperature": 0.0, "ignore_eos": False, "structured_outputs": StructuredOutputs(regex="[a-z ]{5,20}")},
}


def with_weights(folder: Path, poison: dict[str, torch.Tensor]) -> Path:
    """The model that ships, its weights of these names other ones."""
    shutil.copytree(DEFAULT_MODEL, folder)
    save_file(load_file(folder / "model.safetensors") | poison, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One channel of the embedding is the poisonous token's alone, and it alone meets huge weights."""
    weights = load_file(DEFAULT_MODEL / "model.safetensors")
    embedding, into_layer = "backbone.embeddings.weight", "backbone.layers.0.mixer.in_proj.weight"
    weights[embedding][:, 0] = 0.0
    weights[embedding][POISON, 0] = 1.0
    weights[into_layer][:, 0] = HUGE
    changed = {name: weights[name] for name in (embedding, into_layer)}
    return with_weights(tmp_path_factory.mktemp("overflow") / "model", changed)


@pytest.fixture(params=["v1", "v2"])
def core(folder: Path, request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    with LLM(str(folder), runner=request.param, **OPTIONS) as llm:
        yield llm.core


def add(core: EngineCore, name: str, prompt: list[int], **params: Any) -> None:
    chosen = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": 1} | params)
    core.add_request(EngineRequest(name, prompt, chosen))


def run(core: EngineCore) -> dict[str, list[EngineOutput]]:
    outputs = run_core.run(core)
    assert all(num_free == num_usable for num_free, num_usable in core.free_blocks().values())
    return outputs


def assert_fails(outputs: list[EngineOutput], *given: int) -> None:
    assert (token_ids(outputs), outputs[-1].finish_reason, outputs[-1].error) == (list(given), "error", NOT_NUMBERS)
    assert all(output.finish_reason is None for output in outputs[:-1])


def run_sound(core: EngineCore) -> dict[str, list[int]]:
    for name, prompt in SOUND.items():
        add(core, name, prompt, temperature=0.0)
    return {name: token_ids(outputs) for name, outputs in run(core).items()}


def test_every_way_of_taking_a_token_fails_and_the_neighbours_go_on(core: EngineCore) -> None:
    alone = run_sound(core)
    assert all(len(text) == 24 for text in alone.values())
    for _ in range(2):  # the second time with what the first has left in the cache
        for name, way in WAYS.items():
            add(core, name, BAD, **way)
        for name, prompt in SOUND.items():
            add(core, name, prompt, temperature=0.0)
        outputs = run(core)
        for name in WAYS:
            assert_fails(outputs[name])
        assert {name: token_ids(outputs[name]) for name in SOUND} == alone
        assert outputs["greedy"][-1].num_cached_tokens == outputs["a"][-1].num_cached_tokens == 2 * BLOCK


def test_a_text_that_comes_to_the_poison_by_itself_keeps_what_it_had(core: EngineCore) -> None:
    add(core, "bad", SOUND["a"], temperature=0.0, logit_bias={POISON: 100.0})
    assert_fails(run(core)["bad"], POISON)
    add(core, "again", SOUND["a"], temperature=0.0)
    (*_, last) = run(core)["again"]
    assert last.finish_reason == "length" and last.num_cached_tokens == 2 * BLOCK


def test_what_an_aborted_prompt_has_left_goes_with_the_first_that_fails_on_it(core: EngineCore) -> None:
    add(core, "aborted", BAD, temperature=0.0)
    while core.scheduler.requests["aborted"].num_computed_tokens < 6 * BLOCK:  # all but its last token
        core.step()
    core.abort("aborted")
    num_cached = []
    for name in ("second", "third"):
        add(core, name, BAD, temperature=0.0)
        outputs = run(core)[name]
        assert_fails(outputs)
        num_cached.append(outputs[-1].num_cached_tokens)
    assert num_cached == [6 * BLOCK, 0]
    assert core.scheduler.blocks.kv_pool.num_cached == core.scheduler.blocks.mamba_pool.num_cached == 0


def test_a_drafter_that_overflows_costs_its_drafts(tmp_path: Path) -> None:
    name = "mtp.layers.1.mixer.up_proj.weight"
    huge = load_file(DEFAULT_MODEL / "model.safetensors")[name].sign() * HUGE
    texts = []
    for runner in ("v1", "v2"):
        path = with_weights(tmp_path / runner, {name: huge})
        with LLM(str(path), runner=runner, **OPTIONS) as llm:
            texts.append(run_sound(llm.core))
            assert llm.core.stats().spec_decode_num_accepted_tokens_total == 0
    with LLM(**OPTIONS | {"spec_tokens": 0}) as llm:
        assert texts == [run_sound(llm.core)] * 2


def test_the_reference_says_so(folder: Path) -> None:
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        ReferenceEngine.load(folder).generate(BAD, SamplingParams(temperature=0.0))


def test_the_server_says_so(folder: Path) -> None:
    options = (f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items())
    with ServerProcess(folder, *options) as server:
        url = f"{server.url}/v1/completions"
        for stream in (False, True):
            status, answer = call(url, {"prompt": BAD, "stream": stream})
            assert status == 500 and answer["error"]["code"] == "engine_error"
            assert answer["error"]["message"] == NOT_NUMBERS
        bias = {"logit_bias": {str(POISON): 100}, "temperature": 0, "return_token_ids": True}
        status, text = call(url, {"prompt": SOUND["a"], "stream": True, **bias})
        first, last = (json.loads(line.removeprefix("data: ")) for line in text.strip().split("\n\n"))
        assert status == 200 and first["choices"][0]["token_ids"] == [POISON]
        assert last["error"]["message"] == NOT_NUMBERS
        status, answer = call(url, {"prompt": SOUND["a"], "max_tokens": 5, "ignore_eos": True})
        assert status == 200 and answer["usage"]["completion_tokens"] == 5
        assert call(f"{server.url}/health")[0] == 200
        server.wait_line("request request-0-0 failed: the model's logits are NaN or infinite")
