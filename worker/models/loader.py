"""Reads a checkpoint's weights by their published names, a tensor at a time. Knows files; nothing of layers.

A model takes each tensor it needs from a `Weights`, with the shape it expects. What is missing, of another shape, or
left over is gathered and reported together, by name, when the model is complete.
"""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from mambalign.worker.models.checkpoint_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    TEXT_CONFIGS,
    check_content,
)

DERIVED_SUFFIX = ".rotary_emb.inv_freq"  # of what older checkpoints hold and config.json says as well
SCALE_SUFFIX = "_scale_inv"  # after the name of an fp8 weight: what each of its blocks is multiplied by
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")  # the second is an older name
QUANTIZED_FILE = "hf_quant_config.json"  # of checkpoints whose config.json does not say that they are quantised
READABLE = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn))
MAX_STAND_IN = 1 << 32  # elements of a tensor that stands in for one that is not there
SHARDS = "model-*-of-*.safetensors"
OTHER_FORMATS = ("*.safetensors", "*.gguf")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class CheckpointError(ValueError):
    """A checkpoint that cannot be served: files missing or unreadable, weights missing, unexpected or mis-shaped."""


class DummyWeights:
    """Random weights of any shape that is asked for: benchmarks, tests, and (on "meta") counting bytes.

    The same name and shape give the same values on one device. Scales are such that activations stay finite.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str, is_tied: bool = False):
        self.dtype, self.device, self.is_tied = dtype, torch.device(device), is_tied
        self.num_bytes = 0

    def __contains__(self, name: str) -> bool:
        return not (self.is_tied and name == "lm_head.weight")

    def has_any(self, prefix: str) -> bool:
        return True

    def skip(self, prefix: str) -> None:
        pass

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.num_bytes += tensor.nbytes
        if self.device.type == "meta":
            return tensor
        if "norm" in name or name.endswith(".D"):
            return tensor.fill_(1.0)
        if name.endswith(".A_log"):
            return tensor.copy_(torch.linspace(1.0, 16.0, shape[0]).log())
        if name.endswith(".dt_bias"):
            return tensor.copy_(torch.linspace(-6.0, -2.0, shape[0]))
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    def take_linear(self, name: str, out_features: int, in_features: int) -> torch.Tensor:
        return self.take(name, (out_features, in_features)).t().contiguous()

    def finish(self) -> None:
        pass


class Weights:
    """The tensors of one checkpoint folder, each taken at most once.

    dtype: what `take` and `take_linear` convert to; vectors of norms and states are asked for in fp32.
    fp8_block: rows and columns that share a scale in fp8 weights, which become plain ones as they are read.
    prefix: of the names of the weights that are the model's, in a folder that holds others too; they are asked for
    without it, and the others are left alone.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device | str,
        show_progress: bool = True,
        fp8_block: tuple[int, int] | None = None,
        prefix: str = "",
    ):
        self.folder, self.dtype, self.device, self.fp8_block, self.prefix = folder, dtype, device, fp8_block, prefix
        file_of = _weight_files(folder)
        self._open_files = {file: _open(folder / file) for file in sorted({*file_of.values()})}
        self._file_of = {
            name.removeprefix(prefix): file
            for name, file in file_of.items()
            if name.startswith(prefix) and not name.endswith(DERIVED_SUFFIX)
        }
        self._check_shards()
        self._left = set(self._file_of)
        self._missing: list[str] = []
        self._misshaped: list[str] = []
        self._unreadable: list[str] = []
        self._not_finite: list[str] = []
        self._progress = tqdm(
            total=len(self._file_of), desc="Loading weights", unit=" tensors", disable=None if show_progress else True
        )

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def has_any(self, prefix: str) -> bool:
        """Whether any weight's name starts with `prefix`."""
        return any(name.startswith(prefix) for name in self._file_of)

    def skip(self, prefix: str) -> None:
        """Weights that the model knows and does not use; they are not reported as unexpected."""
        self._left = {name for name in self._left if not name.startswith(prefix)}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor `name`. What is wrong with one is noted, and a tensor of zeros stands in until `finish`."""
        dtype = dtype or self.dtype
        self._left.discard(name)
        if name not in self._file_of:
            self._missing.append(name)
            return self._stand_in(shape, dtype)
        tensor = self._read(name)
        if tuple(tensor.shape) != shape:
            self._misshaped.append(f"{name}: {list(tensor.shape)} in the file, {list(shape)} by config.json")
            return self._stand_in(shape, dtype)
        is_fp8 = self.fp8_block is not None and name + SCALE_SUFFIX in self._file_of
        if tensor.dtype not in READABLE or (tensor.dtype == torch.float8_e4m3fn) != is_fp8:
            self._unreadable.append(f"{name}: {str(tensor.dtype).removeprefix('torch.')}")
            return self._stand_in(shape, dtype)
        tensor = tensor.to(self.device)
        if is_fp8:
            self._left.discard(name + SCALE_SUFFIX)
            scale = self._read(name + SCALE_SUFFIX).to(self.device)
            blocks = [-(-size // each) for size, each in zip(shape[-2:], self.fp8_block, strict=True)]
            if list(scale.shape) != [*shape[:-2], *blocks]:
                self._misshaped.append(f"{name + SCALE_SUFFIX}: {list(scale.shape)} in the file")
                return self._stand_in(shape, dtype)
            tensor = dequantize(tensor, scale, self.fp8_block)
        tensor = tensor.to(dtype)
        if not tensor.isfinite().all():
            self._not_finite.append(name)
        return tensor

    def _stand_in(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not all(isinstance(n, int) and n >= 0 for n in shape) or math.prod(shape) > MAX_STAND_IN:
            self._left.clear()  # the model has not come to them
            self.finish()
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def take_linear(self, name: str, out_features: int, in_features: int) -> torch.Tensor:
        """The weight of a linear layer, published as [out, in], laid out K-major: [in, out], contiguous."""
        return self.take(name, (out_features, in_features)).t().contiguous()

    def finish(self) -> None:
        """Close the files. Raises CheckpointError when the checkpoint and the model do not agree."""
        self._progress.close()
        self._open_files.clear()
        faults = {
            "missing": self._missing,
            "of the wrong shape": self._misshaped,
            "of a kind that is not served": self._unreadable,
            "with numbers that are not finite": self._not_finite,
            "unexpected": sorted(self._left),
        }
        faults = {kind: [self.prefix + name for name in names] for kind, names in faults.items()}
        texts = [f"{len(names)} {kind}: {_some(names)}" for kind, names in faults.items() if names]
        if texts:
            raise CheckpointError(f"weights of {self.folder} do not fit its config.json; " + "; ".join(texts))

    def _read(self, name: str) -> torch.Tensor:
        self._progress.update()
        return self._open_files[self._file_of[name]].get_tensor(self.prefix + name)

    def _check_shards(self) -> None:
        """Raise CheckpointError where the index promises what a shard does not hold."""
        held = {file: set(shard.keys()) for file, shard in self._open_files.items()}
        lost = [self.prefix + name for name, file in self._file_of.items() if self.prefix + name not in held[file]]
        if lost:
            raise CheckpointError(
                f"{self.folder}: {len(lost)} weights are not where {INDEX_FILE} says that they are: {_some(lost)}"
            )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Tokens that end a text by generation_config.json do so here too."""
    if not folder.is_dir():
        raise CheckpointError(f"no such checkpoint folder: {folder}")
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder} holds no {CONFIG_FILE}")
    config = _read_json(folder / CONFIG_FILE)
    ends = _ending_tokens(_read_json(folder / GENERATION_FILE)) if (folder / GENERATION_FILE).is_file() else []
    for part in (config, *(config.get(name) for name in TEXT_CONFIGS)):
        if part and (every := list(dict.fromkeys(_ending_tokens(part) + ends))):
            part["eos_token_id"] = every
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        check_content(path)
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _ending_tokens(config: dict[str, Any]) -> list[int]:
    """`eos_token_id`: one token id, several or none. Raises CheckpointError for what is none."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise CheckpointError(f"eos_token_id = {value!r} in a configuration; served: token ids")
    return ids


def fp8_block_of(config: dict[str, Any], folder: Path) -> tuple[int, int] | None:
    """Rows and columns that share a scale, or None for a checkpoint that is not quantised.

    config: its config.json. Raises CheckpointError for every other quantisation, naming it.
    """
    parts = [config, *(config.get(name) or {} for name in TEXT_CONFIGS)]
    found = next((part[name] for part in parts for name in QUANTIZATION_FIELDS if part.get(name)), None)
    if not found and (folder / QUANTIZED_FILE).is_file():
        found = _read_json(folder / QUANTIZED_FILE).get("quantization")
    if not found:
        return None
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder} is quantised ({found}); a quantisation is described by an object")
    block = found.get("weight_block_size")
    if found.get("quant_method") == "fp8" and block and found.get("fmt", "e4m3") == "e4m3":
        if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            raise CheckpointError(f"config.json: weight_block_size = {block!r}; served: two positive numbers")
        return block[0], block[1]
    named = [str(found[key]) for key in ("quant_method", "quant_algo", "format", "fmt", "bits") if found.get(key)]
    raise CheckpointError(
        f"{folder} is quantised ({', '.join(named) or 'in an unknown way'}); served: weights that are not, and fp8 "
        f"(e4m3) with a weight_block_size, which become plain ones as they are read"
    )


def dequantize(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """weight [.., N, K] times the scale of each block, [.., ceil(N / rows), ceil(K / columns)]. Returns fp32."""
    rows, columns = weight.shape[-2:]
    each = scale.float().repeat_interleave(block[0], -2)[..., :rows, :]
    return weight.float().mul_(each.repeat_interleave(block[1], -1)[..., :columns])


def _weight_files(folder: Path) -> dict[str, str]:
    """Weight name -> file name, from the index of a sharded checkpoint or the header of a single file."""
    index = folder / INDEX_FILE
    if index.is_file():
        file_of = _read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
            raise CheckpointError(f"{index} has no weight_map from names of weights to names of files")
        outside = sorted({name for name in file_of.values() if Path(name).name != name})
        if outside:
            raise CheckpointError(f"{index} names files that are not in its folder: {_some(outside)}")
        absent = sorted({name for name in file_of.values() if not (folder / name).is_file()})
        if absent:
            raise CheckpointError(
                f"{folder} lacks {len(absent)} of the shards that {INDEX_FILE} names: {_some(absent)}"
            )
        return file_of
    if (folder / SINGLE_FILE).is_file():
        return dict.fromkeys(_open(folder / SINGLE_FILE).keys(), SINGLE_FILE)
    raise CheckpointError(_why_no_weights(folder))


def _why_no_weights(folder: Path) -> str:
    """Of a folder without an index and without a single file: what it holds instead."""
    if (folder / SINGLE_FILE).is_symlink():
        return f"{folder}: {SINGLE_FILE} is a link to a file that is not there"
    shards = _found(folder, SHARDS)
    if shards:
        return f"{folder} holds shards ({_some(shards)}) and no {INDEX_FILE}, which tells what is in which"
    others = _found(folder, *OTHER_FORMATS)
    if others:
        return f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; what is there is not served: {_some(others)}"
    pickles = _found(folder, *PICKLES)
    if pickles:
        return (
            f"{folder} holds pickled weights only ({_some(pickles)}); loading those can run code and is refused. "
            f"Convert them to {SINGLE_FILE}"
        )
    return f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}"


def _found(folder: Path, *patterns: str) -> list[str]:
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def _open(path: Path):
    try:
        check_content(path)
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
