"""Test-wide settings. One thread a process: the machine's cores are shared with servers that tests start."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
