"""Kernels for a CPU: plain loops and vector code, compiled by numba when they are first needed.

The machine code is kept for the next process, under a name that stands for these files: numba itself looks at the file
of the compiled function only, and would go on using code that was made from another version of what it calls.
"""

import hashlib
import os
from pathlib import Path

if "NUMBA_CACHE_DIR" not in os.environ:
    from numba import config

    _sources = sorted(Path(__file__).parent.glob("*.py"))
    _version = hashlib.sha256(b"".join(path.read_bytes() for path in _sources)).hexdigest()[:16]
    _cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    config.CACHE_DIR = str(_cache / "mambalign" / _version)


def warm_up(dtype) -> None:
    """Compile for states and caches of a torch `dtype`: some seconds, once a machine, and not in a request."""
    from mambalign.kernels.cpu import attention, conv, scan  # noqa: F401  the others compile as they are imported

    attention.warm_up(dtype)
