"""Kernels for a CPU: plain loops and vector code, compiled by numba when they are first needed.

The machine code is kept for the next process, under a name that stands for these files: numba itself looks at the file
of the compiled function only, and would go on using code that was made from another version of what it calls.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
from pathlib import Path


def cache_folder() -> str:
    """Of this version's machine code: in the user's cache, or where that takes no file one for this process alone."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mambalign" / version
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except (OSError, RuntimeError):  # read-only; RuntimeError: a user without a home
        own = tempfile.mkdtemp(prefix="mambalign-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return own


if "NUMBA_CACHE_DIR" not in os.environ:
    from numba import config

    config.CACHE_DIR = cache_folder()


def warm_up(dtype) -> None:
    """Compile for states and caches of a torch `dtype`: some seconds, once a machine, and not in a request."""
    from mambalign.kernels.cpu import attention, conv, scan  # noqa: F401  the others compile as they are imported

    attention.warm_up(dtype)
