"""Folders as people have them after a download: served, with what their files say, however they say it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mambalign.engine import LLM, SamplingParams
from mambalign.engine.checkpoint import DEFAULT_MODEL, locate, read_facts
from mambalign.engine.option import ConfigError
from mambalign.engine.prompt_template import PromptTemplate

WEIGHTS = "model.safetensors"
PROMPT = "def read_lines(path):"
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEFAULT_MODEL, tmp_path / "model"))


def edit_json(path: Path, **changes: object) -> None:
    """Change fields of a JSON file; None takes one out."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def open_engine(model: Path | str) -> LLM:
    return LLM(
        str(model), mamba_cache_mode="align", mamba_block_size=64, spec_tokens=3, cache_memory=64 << 20,
        max_model_len=256, device="cpu",
    )  # fmt: skip


def token_ids(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with open_engine(DEFAULT_MODEL) as llm:
        return token_ids(llm)


def into_hub_cache(folder: Path) -> Path:
    """As the hub's client keeps a repository: a snapshot of links to files that are named by their content."""
    repository = folder.parent / "models--owner--some-model"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    folder.rename(repository / "blobs")
    for i, file in enumerate(sorted((repository / "blobs").iterdir())):
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.rename(file.with_name(f"{i:040x}")).name)
    return snapshot


def test_a_snapshot_in_the_hubs_cache_has_its_hub_id_for_a_name(folder: Path, expected: list[int]) -> None:
    snapshot = into_hub_cache(folder)
    with open_engine(f"{snapshot}/") as llm:
        assert llm.core.facts.name == "owner/some-model"
        assert token_ids(llm) == expected


def test_where_a_folder_may_lie(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    for given in ("~/model", "model/", "./model", str(folder) + "/"):
        assert locate(given) == folder.resolve()
        assert read_facts(given, locate(given)).name == "model"
    odd = folder.rename(folder.with_name("mödel mit 模型 50%"))
    assert read_facts(str(odd), locate(str(odd))).path == odd
    for wrong, words in (("~/nowhere", "no such folder"), (str(odd / WEIGHTS), "a file; give the folder")):
        with pytest.raises(ConfigError, match=words):
            locate(wrong)


def test_rotary_tables_in_the_file_are_left_alone(folder: Path, expected: list[int]) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file(weights | {"backbone.layers.0.mixer.rotary_emb.inv_freq": torch.ones(4)}, folder / WEIGHTS)
    with open_engine(folder) as llm:
        assert token_ids(llm) == expected


def test_a_head_that_config_json_does_not_announce_leaves_drafts_to_ngram(folder: Path, expected: list[int]) -> None:
    edit_json(folder / "config.json", num_nextn_predict_layers=0)
    with open_engine(folder) as llm:
        assert llm.core.spec_method == "ngram"
        assert token_ids(llm) == expected


def test_without_a_token_that_ends_texts_the_tokenizers_ends_them(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink(missing_ok=True)
    with open_engine(folder) as llm:
        assert llm.core.eos_token_ids == [llm.core.tokenizer.eos_token_id]
    edit_json(folder / "config.json", eos_token_id=[5, 10**6])
    with open_engine(folder) as llm:
        assert llm.core.eos_token_ids == [5]  # the other can't be sampled


def store_in(dtype: torch.dtype) -> Callable[[Path], None]:
    """Matrices in `dtype`, vectors in fp32, as published checkpoints mix them."""

    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        weights = {name: each.to(dtype) if each.ndim > 1 else each.float() for name, each in weights.items()}
        save_file(weights, folder / WEIGHTS)

    return change


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_stored_dtype_is_what_either_file_says(folder: Path, dtype: str) -> None:
    path, config = folder / "config.json", json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if "dtype" not in name}
    outer = {"model_type": "nemotron_h_omni", "text_config": config}
    said = [config | {"dtype": dtype}, config | {"torch_dtype": f"torch.{dtype}"}, outer | {"dtype": dtype}]
    for each in said:
        path.write_text(json.dumps(each))
        assert read_facts(None, folder).dtype == dtype
    store_in(getattr(torch, dtype))(folder)
    for each in (config, config | {"dtype": "auto"}, outer):
        path.write_text(json.dumps(each))
        assert read_facts(None, folder).dtype == dtype


def test_a_length_that_does_not_fit_is_refused_with_the_longest_that_does(folder: Path) -> None:
    edit_json(folder / "config.json", max_position_embeddings=1 << 20)
    options = {"spec_tokens": 3, "mamba_cache_mode": "align", "cache_memory": 64 << 20, "device": "cpu"}
    with pytest.raises(ConfigError) as error:
        LLM(str(folder), **options)
    fitting = int(re.search(r"use --max-model-len (\d+) or more --cache-memory$", str(error.value))[1])
    with pytest.raises(ConfigError, match=f"use --max-model-len {fitting} or more"):
        LLM(str(folder), max_model_len=fitting + 1, **options)
    with LLM(str(folder), max_model_len=fitting, **options) as llm:
        assert llm.core.max_model_len == fitting


def test_templates_of_a_name_that_no_conversation_takes_are_none(folder: Path) -> None:
    named = [{"name": "rag", "template": "{{ documents }}"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    with open_engine(folder) as llm:
        assert not PromptTemplate(llm.core.tokenizer)
        llm.core.tokenizer.chat_template = 5
        with pytest.raises(ConfigError, match="it is no text"):
            PromptTemplate(llm.core.tokenizer)
