"""Where a checkpoint lies and what its files say. Reads JSON and the tokenizer; no weight but its name, no torch."""

import json
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mambalign.engine.option import ConfigError
from mambalign.worker.models.checkpoint_files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, TEXT_CONFIGS, check_content

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_MODEL = Path(__file__).resolve().parent / "default_model"
DEFAULT_MODEL_NAME = "default"
_DTYPES = ("float32", "bfloat16", "float16")
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_SILENT_FAMILIES = ("qwen3_next", "qwen3_5")  # whose config.json need not tell of the MTP head
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
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise ConfigError(f"model {model!r}: a file; give the folder of a checkpoint")
    if model.startswith("~") or Path(model).is_absolute() or model.startswith(".") or model.count("/") != 1:
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
    if not (path / CONFIG_FILE).exists():
        there = sorted(each.name for each in path.iterdir())[:8]
        raise ConfigError(f"model {str(path)!r}: no config.json there, but: {', '.join(there) or 'nothing'}")
    try:
        config: dict[str, Any] = json.loads(_plain_file(path / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"a JSON object is needed, not {type(config).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model {str(path)!r}: cannot read its config.json ({error})") from error
    part = next((name for name in TEXT_CONFIGS if config.get(name)), None)
    text = config[part] if part else config
    if not isinstance(text, dict):
        raise ConfigError(f"model {str(path)!r}: its config.json has a {part} that is no JSON object")
    for key in ("max_position_embeddings", "vocab_size"):
        value = text.get(key)
        if value is None:
            raise ConfigError(f"model {str(path)!r}: its config.json has no {key}")
        if type(value) is not int or value < 1:
            raise ConfigError(f"model {str(path)!r}: its config.json has {key} = {value!r}; served: 1 and more")
    is_default = path == DEFAULT_MODEL
    return CheckpointFacts(
        name=DEFAULT_MODEL_NAME if is_default else checkpoint_name(model, path),
        path=path,
        is_default=is_default,
        max_model_len=text["max_position_embeddings"],
        dtype=_stored_dtype(text, config, path),
        vocab_size=text["vocab_size"],
        num_mtp_layers=_num_mtp_layers(text, path),
    )


def _plain_file(path: Path) -> Path:
    """`path`, or OSError where reading would wait for ever (a FIFO), never end (a device), or give no content."""
    if path.exists():
        if not path.is_file():
            raise OSError(f"{path.name} is no plain file")
        check_content(path)
    return path


def _stored_dtype(text: dict[str, Any], config: dict[str, Any], path: Path) -> str:
    """As config.json says, under its newer or older name and in either part, else as the weights do."""
    for said in (part.get(name) for part in (text, config) for name in ("dtype", "torch_dtype")):
        if isinstance(said, str) and said.removeprefix("torch.") in _DTYPES:
            return said.removeprefix("torch.")
    stored = {str(said.get("dtype")) for said in _some_weights(path).values()}
    return "float16" if "F16" in stored else "float32" if stored <= {"F32", "F64"} else "bfloat16"


def _num_mtp_layers(text: dict[str, Any], path: Path) -> int:
    """As config.json says, else, of the families that do not say it, as the names of the weights do.

    0 where there are weights and none is a head's.
    """
    said = next((text[key] for key in _MTP_KEYS if text.get(key) is not None), None)
    names = weight_names(path)
    if not names or said == 0:
        return said or 0
    if said is None and not str(text.get("model_type")).startswith(_SILENT_FAMILIES):
        return 0
    found = (re.match(r"(?:language_model\.)?mtp\.layers\.(\d+)\.", name) for name in names)
    layers = {match[1] for match in found if match}
    return said if said and layers else len(layers)


def weight_names(path: Path) -> list[str]:
    """Names of the checkpoint's weights, from its index or its only file's header; none if it has neither."""
    return list(_shard_of_weights(path)) or list(_header(path / SINGLE_FILE))


def _some_weights(path: Path) -> dict[str, dict[str, Any]]:
    """What the first shard, or the only file, says of each of its weights: dtype and shape."""
    return _header(path / min(_shard_of_weights(path).values(), default=SINGLE_FILE))


def _shard_of_weights(path: Path) -> dict[str, str]:
    """Weight name -> file name, by the checkpoint's index; empty without one that can be read."""
    try:
        file_of = json.loads(_plain_file(path / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        return {name: file for name, file in file_of.items() if Path(file).name == file}
    except Exception:  # of many kinds, for a file that is no such file: the loader says what is wrong with it
        return {}


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """The header of a safetensors file; empty for a file that has none."""
    try:
        with _plain_file(file).open("rb") as opened:
            (num_bytes,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(num_bytes))
        return {name: dict(said) for name, said in header.items() if name != "__metadata__"}
    except Exception:  # as for an index
        return {}


def checkpoint_name(model: str | None, path: Path) -> str:
    """A hub id is its own name; a folder's is its last part, or the hub id that its place in the hub's cache tells."""
    if model is not None and not Path(model).expanduser().is_dir():
        return model
    cached = path.parent.parent.name
    if path.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")
    return path.name


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
        tokenizer = Tokenizer.from_pretrained(path, trust_remote_code=False)  # else it asks whether to run that code
        tokenizer.model_max_length = sys.maxsize
        return tokenizer
    except Exception as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = "it is code of the checkpoint's own, which is not run"
        elif not (path / "tokenizer.json").exists():
            reason = f"there is no tokenizer.json; {reason}"
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
