"""The files of a published checkpoint, by name, and what may lie in the place of one. Imports no torch."""

from pathlib import Path

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TEXT_CONFIGS = ("text_config", "llm_config")  # fields of a multimodal model's config that describe its text part
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_POINTER = b"version https://git-lfs"  # its first bytes


def check_content(path: Path) -> None:
    """Raise OSError, in words, where the file `path` is a pointer to its content, as a clone without Git LFS leaves."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise OSError(f"{path.name} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder")
