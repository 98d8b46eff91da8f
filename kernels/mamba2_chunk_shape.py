"""Sizes of the chunked Mamba-2 scan: what the scheduler must know of it, and what is tuned. Imports nothing."""

CHUNK = 32  # tokens; another number gives other bits
NUM_WARPS = 8  # of a program
