"""Where the machine code of a CPU's kernels is kept: in the user's cache, if there is one to write to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from numba import config
from mambalign.kernels.cpu import attention  # numba refuses to compile for a folder that takes no file
print(config.CACHE_DIR)
"""


def cache_of(home: str, temporary: Path) -> Path:
    """The folder that a process with this home uses."""
    hidden = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": home, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_a_home_keeps_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert cache_of(str(home), tmp_path).parent == home / ".cache" / "mambalign"
    assert cache_of(str(home), tmp_path).exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder here that takes no file from anybody")
def test_without_one_it_lasts_as_long_as_the_process(tmp_path: Path) -> None:
    folder = cache_of("/proc/self", tmp_path)
    assert folder.parent == tmp_path and not folder.exists()
