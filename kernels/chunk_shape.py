"""Sizes of the scans by chunks: what the scheduler must know of them. Imports nothing."""

MAMBA2_CHUNK = 32  # tokens; another number gives other bits
DELTA_CHUNK = 64  # tokens of the gated delta rule; another number gives other bits
