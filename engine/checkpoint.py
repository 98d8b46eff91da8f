"""Where a checkpoint lies and what its files say. Reads JSON and the tokenizer; no weight but its name, no torch."""

import json
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mambalign.engine.option import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_MODEL = Path(__file__).resolve().parent / "default_model"
DEFAULT_MODEL_NAME = "default"
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint's own files say, as far as options depend on it."""

    name: str  # for people and the API: hub id or folder name
    path: Path  # local folder
    is_default: bool  # the small model that ships
    max_model_len: int  # tokens
    dtype: str  # of the stored weights: "float32", "bfloat16", "float16"
    vocab_size: int
    num_mtp_layers: int  # 0: no MTP head


def locate(model: str | None, *, weights: bool = True) -> Path:
    """The local folder of `model`: None is the model that ships; else a folder; else a hub id, downloaded.

    With `weights` False a download leaves the weights out. Raises ConfigError if there is no such checkpoint.
    """
    if model is None:
        return DEFAULT_MODEL
    if Path(model).is_dir():
        return Path(model).resolve()
    if Path(model).is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise ConfigError(f"model {model!r}: no such folder (and a hub id has the form owner/name)")
    from huggingface_hub import snapshot_download  # only here: a local folder needs no hub client

    patterns = [*_SMALL_FILES, *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the client raises a dozen kinds: bad id, no access, no network
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model {model!r}: no such folder, and the hub said: {reason}") from error


def read_facts(model: str | None, path: Path) -> CheckpointFacts:
    """Read `path/config.json`. Raises ConfigError if it is missing or lacks what the engine needs."""
    try:
        config: dict[str, Any] = json.loads(_plain_file(path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"a JSON object is needed, not {type(config).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model {str(path)!r}: cannot read its config.json ({error})") from error
    text = config.get("text_config") or config.get("llm_config") or config
    for key in ("max_position_embeddings", "vocab_size"):
        if not isinstance(text.get(key), int):
            raise ConfigError(f"model {str(path)!r}: its config.json has no {key}")
    is_default = path == DEFAULT_MODEL
    return CheckpointFacts(
        name=DEFAULT_MODEL_NAME if is_default else checkpoint_name(model, path),
        path=path,
        is_default=is_default,
        max_model_len=text["max_position_embeddings"],
        dtype=text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "float32",
        vocab_size=text["vocab_size"],
        num_mtp_layers=_num_mtp_layers(text, path),
    )


def _plain_file(path: Path) -> Path:
    """`path`, or OSError where reading would wait for ever (a FIFO) or never end (a device)."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is no plain file")
    return path


def _num_mtp_layers(text: dict[str, Any], path: Path) -> int:
    """As config.json says, else as the names of the weights do; 0 where there are weights and none is a head's."""
    said = next((text[key] for key in _MTP_KEYS if text.get(key)), 0)
    names = weight_names(path)
    if not names:
        return said
    layers = {name.split(".")[2] for name in names if name.startswith("mtp.layers.")}
    return said if said and layers else len(layers)


def weight_names(path: Path) -> list[str]:
    """Names of the checkpoint's weights, from its index or its only file's header; none if it has neither."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    try:
        if index.is_file():
            return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if single.is_file():
            with single.open("rb") as file:
                (num_bytes,) = struct.unpack("<Q", file.read(8))
                return [name for name in json.loads(file.read(num_bytes)) if name != "__metadata__"]
    except Exception:  # of many kinds, for a file that is no such file: the loader says what is wrong with it
        pass
    return []


def checkpoint_name(model: str | None, path: Path) -> str:
    """A hub id is its own name; a folder's is its last part."""
    return model if model is not None and not Path(model).is_dir() else path.name


def load_tokenizer(path: Path) -> "PreTrainedTokenizerBase":
    """The checkpoint's tokenizer, chat template included. Raises ConfigError if it has none.

    It makes texts of any length into tokens without a word: what is too long is the engine's to say.
    """
    try:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            _plain_file(path / name)
        if has_plain_tokenizer(path):
            from transformers import PreTrainedTokenizerFast as Tokenizer  # unlike AutoTokenizer it imports no torch
        else:
            from transformers import AutoTokenizer as Tokenizer
        tokenizer = Tokenizer.from_pretrained(path)
        tokenizer.model_max_length = sys.maxsize
        return tokenizer
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model {str(path)!r}: cannot load its tokenizer ({reason})") from error


def load_chat_template(option: str) -> str:
    """`--chat-template`: the text of a file, or the option itself if it is a template. Raises ConfigError."""
    if "{{" in option or "{%" in option:
        return option
    try:
        return Path(option).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {option}: cannot be read ({error})") from error


def has_plain_tokenizer(path: Path) -> bool:
    """tokenizer.json says everything: no class of transformers adds to it."""
    settings = path / "tokenizer_config.json"
    if not (path / "tokenizer.json").exists() or not settings.exists():
        return False
    return json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class") in _PLAIN_TOKENIZERS
