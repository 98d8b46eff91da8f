"""Sizes of the scans by chunks: what the scheduler must know of them, and what is tuned. Imports nothing."""

MAMBA2_CHUNK = 32  # tokens; another number gives other bits

DELTA_CHUNK = 64  # tokens of the gated delta rule; another number gives other bits
DELTA_BLOCK_V = 32  # rows of a state that a program carries over the chunks of a text
DELTA_NUM_WARPS = 4  # of a program: those of one product of 64 rows
DELTA_NUM_STAGES = 3  # a chunk's inputs are loaded while the two before are computed; with 2 the loads come too late
