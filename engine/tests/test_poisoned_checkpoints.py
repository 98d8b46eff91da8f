"""Checkpoints that are broken, or made to do harm: refused before they serve, in words, with exit code 2."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from server_process import serve_command

from mambalign.engine import LLM
from mambalign.engine.checkpoint import DEFAULT_MODEL
from mambalign.engine.option import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "backbone.norm_f.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def poison(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return poison


def with_config(**changes: object) -> Callable[[Path], None]:
    def poison(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return poison


def with_text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def truncate(folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) // 2)


def huge_header(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 7 + b"\x7f" + b"{}")


def index_of(name: str) -> Callable[[Path], None]:
    """A shard's name in the index leads to the real weights, outside the folder."""

    def poison(folder: Path) -> None:
        weights = folder / WEIGHTS
        names = list(load_file(weights))
        weights.rename(folder.parent / "outside.safetensors")
        target = name.format(outside=folder.parent / "outside.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, target)}))

    return poison


def index_without_weight(folder: Path) -> None:
    names = [*load_file(folder / WEIGHTS), "backbone.ghost"]
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, WEIGHTS)}))


def renamed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / WEIGHTS).rename(folder / name) and None


def link_to_nothing(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../blobs/0123")


def tokenizer_of_its_own_code(folder: Path) -> None:
    (folder / "tokenization_own.py").write_text("raise SystemExit('this ran')")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def fifo(name: str) -> Callable[[Path], None]:
    def poison(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return poison


POISONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "cannot read"),
    "empty": (with_text(WEIGHTS, ""), "cannot read"),
    "huge header": (huge_header, "cannot read"),
    "pickle": (renamed("pytorch_model.bin"), "pickled weights only"),
    "pointer": (with_text(WEIGHTS, POINTER), "model.safetensors is a Git LFS pointer"),
    "config of a pointer": (with_text("config.json", POINTER), "config.json is a Git LFS pointer"),
    "tokenizer of a pointer": (with_text("tokenizer.json", POINTER), "tokenizer.json is a Git LFS pointer"),
    "index of a pointer": (with_text(INDEX, POINTER), "index.json is a Git LFS pointer"),
    "index without weight": (index_without_weight, f"not where {INDEX} says that they are: backbone.ghost"),
    "shards without index": (renamed("model-00001-of-00001.safetensors"), f"-00001.safetensors) and no {INDEX}"),
    "another format": (renamed("model-Q4.gguf"), "not served: model-Q4.gguf"),
    "link to nothing": (link_to_nothing, f"{WEIGHTS} is a link to a file that is not there"),
    "nan": (with_weights(lambda w: w[NORM].fill_(float("nan"))), f"1 with numbers that are not finite: {NORM}"),
    "infinite": (with_weights(lambda w: w[NORM][3:4].fill_(float("inf"))), "not finite"),
    "integers": (with_weights(lambda w: w.update({NORM: w[NORM].to(torch.int8)})), f"is not served: {NORM}: int8"),
    "fp8 without scales": (
        with_weights(lambda w: w.update({NORM: w[NORM].to(torch.float8_e4m3fn)})),
        f"is not served: {NORM}: float8_e4m3fn",
    ),
    "path upwards": (index_of("../outside.safetensors"), "not in its folder: ../outside.safetensors"),
    "absolute path": (index_of("{outside}"), "not in its folder: /"),
    "index of no object": (with_text(INDEX, "[1, 2]"), "must hold a JSON object"),
    "index without map": (with_text(INDEX, '{"weight_map": 3}'), "has no weight_map"),
    "index of garbage": (with_text(INDEX, "{"), "is not valid JSON"),
    "config of no object": (with_text("config.json", "[]"), "a JSON object is needed, not list"),
    "deep config": (with_text("config.json", "[" * 100_000), "cannot read its config.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json there, but: "),
    "text of a size": (with_config(hidden_size="many"), "hidden_size = 'many'; served: whole numbers from 1 on"),
    "size of a fraction": (with_config(conv_kernel=4.5), "conv_kernel = 4.5; served: whole numbers"),
    "text of a number": (with_config(layer_norm_epsilon="1e-5"), "layer_norm_epsilon = '1e-5'; served: numbers"),
    "eps below zero": (with_config(layer_norm_epsilon=-1.0), "layer_norm_epsilon = -1.0; served: numbers from 0 on"),
    "number of a flag": (with_config(use_conv_bias=3), "use_conv_bias = 3; served: true, false"),
    "zero size": (with_config(n_groups=0), "n_groups = 0; served: whole numbers from 1 on"),
    "text of the vocabulary": (with_config(vocab_size="2048"), "vocab_size = '2048'; served: 1 and more"),
    "text that ends": (with_config(eos_token_id="</s>"), "eos_token_id = '</s>' in a configuration; served: token ids"),
    "list of a part": (with_config(text_config=[1]), "a text_config that is no JSON object"),
    "fp8 of one number": (
        with_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128]}),
        "weight_block_size = [128]; served: two positive numbers",
    ),
    "quantisation of a word": (with_config(quantization_config="fp8"), "is quantised (fp8)"),
    "older quantisation": (with_config(compression_config={"quant_method": "sparseml"}), "is quantised (sparseml)"),
    "absurd size": (with_config(intermediate_size=10**12), "of the wrong shape"),
    "negative size": (with_config(hidden_size=-1), "hidden_size = -1; served: whole numbers from 1 on"),
    "no layers": (with_config(hybrid_override_pattern="", layers_block_type=[], num_hidden_layers=0), "config.json"),
    "config that never comes": (fifo("config.json"), "config.json is no plain file"),
    "weights that never come": (fifo(WEIGHTS), "holds neither"),
    "tokenizer that never comes": (fifo("tokenizer.json"), "tokenizer.json is no plain file"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "(there is no tokenizer.json; "),
    "tokenizer of its own code": (tokenizer_of_its_own_code, "code of the checkpoint's own, which is not run"),
    "tokenizer of garbage": (with_text("tokenizer.json", "\x00" * 50), "cannot load its tokenizer"),
    "tokenizer settings of garbage": (with_text("tokenizer_config.json", "[]"), "cannot load its tokenizer"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEFAULT_MODEL, tmp_path / "model"))


@pytest.mark.parametrize("name", POISONS)
def test_a_poisoned_checkpoint_is_refused_in_words(folder: Path, name: str) -> None:
    poison, words = POISONS[name]
    poison(folder)
    with pytest.raises(ConfigError) as error:
        LLM(str(folder), cache_memory=64 << 20, max_model_len=256)
    assert words in str(error.value) and len(str(error.value).splitlines()) == 1


def test_weights_that_the_model_never_came_to_are_not_called_unexpected(folder: Path) -> None:
    with_config(vocab_size=10**12)(folder)
    with pytest.raises(ConfigError, match=r"1 of the wrong shape: backbone\.embeddings\.weight: [^;]*$"):
        LLM(str(folder), cache_memory=64 << 20, max_model_len=256)


def test_the_server_says_it_in_its_last_line(folder: Path) -> None:
    truncate(folder)
    result = subprocess.run([*serve_command(), folder, "--port", "0"], capture_output=True, text=True, timeout=300)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("serve: error: model model: cannot read ")
