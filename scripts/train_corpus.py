"""The text that `train_default_model.py` learns from: Python source every machine has, and its tokenizer.

This module owns file selection (which packages, which licences, which files are held out), the byte-level BPE
and the token stream. It imports no torch. Documents become `<s> tokens </s>`, in an order fixed by the seed.
"""

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import random
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
VOCAB_SIZE = 4096

# Standard-library modules that end-to-end tests take prompts from: never held out.
E2E_PROMPT_MODULES = (
    "argparse",
    "textwrap",
    "heapq",
    "bisect",
    "shlex",
    "fnmatch",
    "csv",
    "configparser",
    "string",
    "calendar",
    "difflib",
    "statistics",
    "tempfile",
    "zipfile",
    "queue",
    "sched",
)

HELD_OUT_SHARE = 1 / 200
FILE_BYTES = (200, 400_000)
TOKENIZER_SAMPLE_BYTES = 24_000_000
PERMISSIVE = re.compile(
    r"\b(MIT|MIT-0|MIT-CMU|BSD|0BSD|BSD-[23]-Clause|Apache|Apache-2\.0|PSF|PSF-2\.0|Python-2\.0|"
    r"Python Software Foundation|ISC|ISCL|HPND|Zlib|Unlicense|CC0|CC0-1\.0)\b",
    re.IGNORECASE,
)
COPYLEFT = re.compile(r"GPL|MPL|EPL|CDDL|EUPL|Mozilla|Proprietary|NVIDIA|Commercial", re.IGNORECASE)
VENDORED = re.compile(r"(^|/)(_?vendor(ed)?|_?third_?party|externals?|_distutils)(/|$)")


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: `name` is its path relative to its root ('stdlib/heapq.py', 'numpy/linalg/...')."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Chosen by a hash of the relative path; never a module that end-to-end tests take prompts from."""
        if self.name.startswith("stdlib/") and Path(self.name).parts[1].split(".")[0] in E2E_PROMPT_MODULES:
            return False
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


@dataclass(frozen=True)
class TokenStream:
    """Training and held-out tokens (uint16), with what they were made of."""

    train: np.ndarray
    held_out: np.ndarray
    held_out_bytes: int
    packages: dict[str, str]
    num_files: int


def licence_of(dist: importlib.metadata.Distribution) -> str:
    """A short licence text from package metadata: the SPDX expression, else classifiers, else the first line."""
    meta = dist.metadata
    if expression := meta.get("License-Expression"):
        # Exceptions of compiler runtimes speak of bundled binaries, not of Python source.
        terms = re.split(r"\s+(?:AND|OR)\s+", expression.replace("(", "").replace(")", ""))
        return " AND ".join(t for t in terms if "GCC-exception" not in t)
    classifiers = [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License")]
    classifiers = [c for c in classifiers if c != "OSI Approved"]
    return "; ".join(classifiers) or (meta.get("License") or "").strip().split("\n")[0][:80]


def permissive_packages() -> dict[str, tuple[str, list[Path]]]:
    """Installed packages whose metadata name a permissive licence: name -> (licence, their .py files)."""
    found: dict[str, tuple[str, list[Path]]] = {}
    for dist in importlib.metadata.distributions():
        name, licence = dist.metadata.get("Name"), licence_of(dist)
        if not name or name == "mambalign" or not PERMISSIVE.search(licence) or COPYLEFT.search(licence):
            continue
        files = [Path(str(dist.locate_file(f))) for f in dist.files or [] if f.suffix == ".py"]
        if files:
            found.setdefault(name.lower(), (licence, files))
    return found


def read_source(path: Path) -> str | None:
    """The text of a file, or None when it is unreadable, too small or large, or looks like a data table."""
    try:
        if not FILE_BYTES[0] <= path.stat().st_size <= FILE_BYTES[1]:
            return None
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    digits = sum(map(text.count, "0123456789"))
    too_wide = len(text) / (text.count("\n") + 1) > 120
    return None if too_wide or digits > 0.2 * len(text) or "\0" in text else text


def collect(seed: int, limit: int | None = None) -> tuple[list[SourceFile], dict[str, str]]:
    """All source files, each text once, shuffled by the seed; and the licence of every package used."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    paths = [
        (f"stdlib/{p.relative_to(stdlib)}", p)
        for p in stdlib.rglob("*.py")
        if not {"site-packages", "dist-packages"} & set(p.parts)
    ]
    licences = {"Python standard library": "PSF-2.0"}
    for name, (licence, files) in permissive_packages().items():
        licences[name] = licence
        for path in files:
            parts = path.parts
            root = max((i for i, part in enumerate(parts) if part.endswith("-packages")), default=len(parts) - 2)
            paths.append(("/".join(parts[root + 1 :]), path))
    texts: dict[bytes, SourceFile] = {}
    for name, path in sorted(paths)[:: 1 if limit is None else max(1, len(paths) // limit)]:
        if not VENDORED.search(name) and (text := read_source(path)) is not None:
            texts.setdefault(hashlib.sha256(text.encode()).digest(), SourceFile(name, text))
    files = sorted(texts.values(), key=lambda f: f.name)
    random.Random(seed).shuffle(files)
    return files, licences


def train_tokenizer(files: list[SourceFile]) -> Tokenizer:
    """Byte-level BPE over a sample of the training files. It adds no special token by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample, used = [], 0
    for file in files:
        if not file.held_out and used < TOKENIZER_SAMPLE_BYTES:
            sample.append(file.text)
            used += len(file.text)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def _encode(job: tuple[str, list[str]]) -> np.ndarray:
    """Worker: `<s> tokens </s>` of every text, as one uint16 array."""
    tokenizer = Tokenizer.from_str(job[0])
    out: list[np.ndarray] = []
    for text in job[1]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        out.append(np.array([BOS, *ids, EOS], dtype=np.uint16))
    return np.concatenate(out) if out else np.zeros(0, np.uint16)


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Token stream of many texts, over all cores, in their order."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    cores = os.cpu_count() or 1
    step = max(1, min(200, len(texts) // cores))
    jobs = [(tokenizer.to_str(), texts[i : i + step]) for i in range(0, len(texts), step)]
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        return np.concatenate(pool.map(_encode, jobs, chunksize=1))


def prepare(folder: Path, seed: int, limit: int | None = None) -> None:
    """Collects, tokenises and writes the streams to `folder`; an existing tokenizer.json there is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    files, licences = collect(seed, limit)
    held_out = [f for f in files if f.held_out]
    if not held_out:
        sys.exit(f"--max-files {limit}: none of {len(files)} files is held out to evaluate by; take more")
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(files).save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    np.save(folder / "held_out.npy", encode(tokenizer, [f.text for f in held_out]))
    np.save(folder / "train.npy", encode(tokenizer, [f.text for f in files if not f.held_out]))
    about = {
        "packages": licences,
        "num_files": len(files),
        "held_out_bytes": sum(len(f.text.encode()) for f in held_out),
        "held_out_files": [f.name for f in held_out],
    }
    (folder / "corpus.json").write_text(json.dumps(about))


def load(folder: Path) -> TokenStream:
    """The streams that `prepare` wrote."""
    about = json.loads((folder / "corpus.json").read_text())
    train, held_out = np.load(folder / "train.npy"), np.load(folder / "held_out.npy")
    return TokenStream(train, held_out, about["held_out_bytes"], about["packages"], about["num_files"])


if __name__ == "__main__":  # train_default_model.py runs this beside compilation
    prepare(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) or None)
