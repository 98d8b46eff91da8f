"""Trains the model that Mambalign ships in `engine/default_model/`: a small hybrid with an MTP head that predicts.

    python scripts/train_default_model.py --out DIR --minutes 9            # on one GPU
    python scripts/train_default_model.py --out DIR --resume DIR/checkpoint --minutes 6

Data, order and initial weights follow from `--seed` and the installed packages; sums on a GPU may still differ in
their last bits. The learning rate warms up, stays, and falls to zero over the last `--decay-share` of the time. With
`--minutes` the step where the fall starts is taken from the clock and printed; `--decay-start N --steps M` repeats
that run. The checkpoint (fp32 weights, bf16 moments, shards under 16 MiB) is always from before the fall, so that a
resumed run goes on where learning was still fast. The shipped model: `--decay-start 7628 --steps 12181`.
"""

import argparse
import math
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import train_corpus
import train_evaluation
from train_checkpoint import Progress, load_checkpoint, save_checkpoint
from train_network import MTP_DEPTHS, Network
from train_optimizer import Optimizer
from train_parameters import CONFIG, init_parameters

LONG_ROW = 4096
SHORT_ROW = 1024
LONG_EVERY = 6
MTP_ROW_SHARE = 3 / 8
MTP_LOSS_WEIGHTS = (0.25, 0.15, 0.10)
SOFT_LABEL_SHARE = 0.5
WARMUP_STEPS = 200
CHECKPOINT_SECONDS = 120
PEAK_FLOPS = 790e12  # a large bf16 matrix product on an H200, measured


class Batches:
    """Rows of LONG_ROW tokens (plus the drafts' targets) in a new order and phase every epoch."""

    def __init__(self, tokens: np.ndarray, rows: int, seed: int, device: str) -> None:
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self.rows, self.seed, self.device = rows, seed, device
        self.windows = (len(tokens) - 2 * LONG_ROW - MTP_DEPTHS - 1) // LONG_ROW
        self.epoch, self.starts = -1, torch.zeros(0, dtype=torch.long)
        if self.windows < rows:
            raise ValueError(f"{len(tokens)} tokens are too few for one batch of {rows} rows of {LONG_ROW}")

    def at(self, step: int) -> torch.Tensor:
        """Token rows of a step: [rows, 4096 + 4], or on five steps of six [4 * rows, 1024 + 4]."""
        per_epoch = self.windows // self.rows
        epoch, index = divmod(step, per_epoch)
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, epoch])
            starts = rng.permutation(self.windows) * LONG_ROW + rng.integers(LONG_ROW)
            self.epoch, self.starts = epoch, torch.from_numpy(starts).to(self.device)
        starts = self.starts[index * self.rows : (index + 1) * self.rows]
        length = LONG_ROW if step % LONG_EVERY == LONG_EVERY - 1 else SHORT_ROW
        starts = (starts[:, None] + torch.arange(0, LONG_ROW, length, device=self.device)).flatten()
        return self.tokens[starts[:, None] + torch.arange(length + MTP_DEPTHS + 1, device=self.device)].long()


def losses(net: Network, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Main loss, and the mean loss of every draft depth over the first MTP_ROW_SHARE of the rows."""
    length = rows.shape[1] - MTP_DEPTHS - 1
    embeddings = net.embed(rows)
    main, h, logits = net.main(embeddings[:, :length].contiguous(), rows[:, 1 : length + 1])
    count = max(1, int(rows.shape[0] * MTP_ROW_SHARE))
    flat = logits.detach().flatten(0, 1)
    drafts = []
    for depth, output in enumerate(net.drafts(h[:count], embeddings[:count])):
        soft = torch.full((length,), SOFT_LABEL_SHARE, device=rows.device)
        soft[length - 1 - depth :] = 0  # the main model's distribution there belongs to the next row
        ahead = flat[depth + 1 :][: count * length].view(count, length, -1)
        targets = rows[:count, depth + 2 : depth + 2 + length]
        drafts.append(net.draft_head(output, net.params["lm_head.weight"], targets, ahead, soft))
    return main.mean(), drafts


def backward(net: Network, rows: torch.Tensor) -> torch.Tensor:
    """Losses [1 + MTP_DEPTHS] of a batch, their weighted sum propagated into the gradients."""
    main, drafts = losses(net, rows)
    total = sum((w * d for w, d in zip(MTP_LOSS_WEIGHTS, drafts, strict=True)), main)
    total.backward()
    return torch.stack([main, *drafts]).detach()


class CapturedBackward:
    """`backward` for one shape of rows as a CUDA graph: the step is launch-bound without it."""

    def __init__(self, net: Network, shape: tuple[int, int], device: str) -> None:
        self.params = list(net.params.values())
        self.rows = torch.randint(3, CONFIG["vocab_size"], shape, device=device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, then settles
                backward(net, self.rows)
                self.clear()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.losses = backward(net, self.rows)
        self.grads = [p.grad for p in self.params]
        self.clear()

    def clear(self) -> None:
        """Drops the gradients, so that the next backward writes new ones."""
        for p in self.params:
            p.grad = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Gradients of these rows in every `p.grad`; returns the losses (valid until the next call)."""
        self.rows.copy_(rows)
        self.graph.replay()
        for p, grad in zip(self.params, self.grads, strict=True):
            p.grad = grad
        return self.losses


def flops_per_token() -> float:
    """Matrix arithmetic of one training token (forward and backward), as counted from the shapes."""
    dim, vocab, mlp = CONFIG["hidden_size"], CONFIG["vocab_size"], CONFIG["intermediate_size"]
    inner, state = CONFIG["mamba_num_heads"] * CONFIG["mamba_head_dim"], CONFIG["ssm_state_size"]
    proj = dim * (3 * inner + 2 * CONFIG["n_groups"] * state + CONFIG["mamba_num_heads"])
    scan = 64 * (CONFIG["n_groups"] * state + inner) + 2 * state * inner
    attention = 3 * dim * dim + dim * SHORT_ROW
    main = {"M": proj + scan, "*": attention, "-": 2 * dim * mlp}
    total = sum(main[kind] for kind in CONFIG["hybrid_override_pattern"]) + dim * vocab
    mtp = sum(main[kind] for kind in CONFIG["mtp_hybrid_override_pattern"]) + 2 * dim * dim + dim * vocab
    return 6.0 * (total + MTP_DEPTHS * MTP_ROW_SHARE * mtp)


class Schedule:
    """Learning rate over steps: warm-up, plateau, and a linear fall to zero whose start may come from the clock."""

    def __init__(self, args: argparse.Namespace, began: float) -> None:
        self.decay_start, self.steps = args.decay_start, args.steps
        self.began, self.budget, self.share = began, args.minutes * 60, args.decay_share

    def scale(self, step: int) -> float:
        """Share of the peak learning rate at a step."""
        if self.decay_start is None or step < self.decay_start:
            return min(1.0, (step + 1) / WARMUP_STEPS)
        return max(0.0, (self.steps - step) / (self.steps - self.decay_start))

    def update(self, step: int, seconds_per_step: float) -> bool:
        """Fixes the fall once its time has come; true at that step."""
        if self.decay_start is not None:
            return step == self.decay_start
        elapsed = time.perf_counter() - self.began
        if elapsed < (1 - self.share) * self.budget:
            return False
        self.decay_start = step
        self.steps = step + max(1, int((self.budget - elapsed) / seconds_per_step))
        print(f"learning rate falls from step {step}: repeat with --decay-start {step} --steps {self.steps}")
        return True


def backwards(net: Network, rows: int, device: str) -> dict[int, Any]:
    """The function that runs forward and backward for each row length (captured on a GPU)."""
    found: dict[int, Any] = {}
    for factor, length in ((LONG_ROW // SHORT_ROW, SHORT_ROW), (1, LONG_ROW)):
        if device == "cpu":
            found[length] = partial(backward, net)
            continue
        started = time.perf_counter()
        found[length] = CapturedBackward(net, (rows * factor, length + MTP_DEPTHS + 1), device)
        print(f"compiled for rows of {length}: {time.perf_counter() - started:.1f} s", flush=True)
    return found


def train(
    args: argparse.Namespace,
    net: Network,
    optimizer: Optimizer,
    run: dict[int, Any],
    data: train_corpus.TokenStream,
    progress: Progress,
) -> None:
    """The loop: batches, losses, updates, a line of figures every `--log-every` steps, checkpoints on the way."""
    batches = Batches(data.train, args.rows, args.seed, args.device)
    held_out = torch.from_numpy(data.held_out.astype(np.int64)).to(args.device)
    schedule = Schedule(args, args.began)
    bytes_per_token = data.held_out_bytes / len(data.held_out)
    print(f"{flops_per_token() / 1e6:.0f} MFLOP a token: the ceiling is {PEAK_FLOPS / flops_per_token() / 1e6:.1f} M/s")
    first, saved, marked = progress.step, time.perf_counter(), (time.perf_counter(), progress.step)
    started, spent = time.perf_counter(), progress.seconds
    while schedule.steps is None or progress.step < schedule.steps:
        pace = (time.perf_counter() - started) / max(1, progress.step - first)
        falls = schedule.update(progress.step, pace)
        if falls or (schedule.decay_start is None and time.perf_counter() - saved > CHECKPOINT_SECONDS):
            progress.seconds = spent + time.perf_counter() - started
            save_checkpoint(args.out / "checkpoint", net.params, optimizer, progress)
            saved = time.perf_counter()
        rows = batches.at(progress.step)
        each = run[rows.shape[1] - MTP_DEPTHS - 1](rows)
        optimizer.step(schedule.scale(progress.step))
        progress.step += 1
        progress.tokens += args.rows * LONG_ROW
        if progress.step % args.log_every == 0:
            figures = [round(v, 3) for v in each.tolist()]  # waits for the device
            now = time.perf_counter()
            rate = (progress.step - marked[1]) * args.rows * LONG_ROW / (now - marked[0])
            held = train_evaluation.quick_loss(net, held_out, args.rows * 4, SHORT_ROW)
            print(
                f"step {progress.step} loss {figures[0]} drafts {figures[1:]} held-out {held:.4f} "
                f"({held / math.log(2) / bytes_per_token:.4f} bits/byte) lr {schedule.scale(progress.step):.2f} "
                f"{rate / 1e6:.2f} M tokens/s ({rate * flops_per_token() / PEAK_FLOPS:.0%} of peak) "
                f"{now - args.began:.0f} s",
                flush=True,
            )
            marked = (time.perf_counter(), progress.step)
    progress.seconds = spent + time.perf_counter() - started


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint/, corpus/ and model/")
    parser.add_argument("--minutes", type=float, default=9.0, help="wall clock from start to the last step")
    parser.add_argument("--decay-share", type=float, default=0.3, help="last part of the time with a falling rate")
    parser.add_argument("--decay-start", type=int, help="step where the rate starts to fall (instead of the clock)")
    parser.add_argument("--steps", type=int, help="last step (with --decay-start)")
    parser.add_argument("--rows", type=int, default=16, help="rows of 4,096 tokens a step")
    parser.add_argument("--resume", type=Path, help="checkpoint folder to go on from")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use instead of training one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-files", type=int, help="use about this many files (for trials)")
    parser.add_argument("--log-every", type=int, default=200, help="steps between lines")
    args = parser.parse_args()
    if args.rows < 2:
        parser.error("--rows: must be at least 2; drafts are trained on the rows before the last")
    if (args.decay_start is None) != (args.steps is None):
        parser.error("--decay-start and --steps go together")
    args.began = time.perf_counter()
    return args


def start_corpus(args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Collects and tokenises in another process, while this one compiles."""
    folder = args.out / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    source = args.tokenizer or (args.resume / "tokenizer.json" if args.resume else None)
    if source:
        (folder / "tokenizer.json").write_bytes(source.read_bytes())
    call = [sys.executable, train_corpus.__file__, str(folder), str(args.seed), str(args.max_files or 0)]
    return subprocess.Popen(call)


def main() -> None:
    """Prepares, trains, evaluates, exports."""
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    corpus = start_corpus(args)
    gpu = args.device == "cuda"
    params = init_parameters(CONFIG, args.seed, args.device)
    net = Network(params, torch.bfloat16 if gpu else torch.float32, compiled=gpu)
    optimizer = Optimizer(params, compiled=gpu)
    progress = load_checkpoint(args.resume, params, optimizer) if args.resume else Progress(args.seed)
    run = backwards(net, args.rows, args.device)
    if corpus.wait():
        raise SystemExit("collecting the corpus failed")
    data = train_corpus.load(args.out / "corpus")
    print(
        f"{len(data.train) / 1e6:.1f} M training tokens from {data.num_files} files of {len(data.packages)} packages, "
        f"{len(data.held_out) / 1e3:.0f} k held out, {time.perf_counter() - args.began:.0f} s since the start",
        flush=True,
    )
    (args.out / "checkpoint").mkdir(parents=True, exist_ok=True)
    tokenizer = (args.out / "corpus" / "tokenizer.json").read_bytes()
    (args.out / "checkpoint" / "tokenizer.json").write_bytes(tokenizer)
    train(args, net, optimizer, run, data, progress)
    facts: dict[str, Any] = asdict(progress) | {"packages": data.packages, "train_tokens": len(data.train)}
    train_evaluation.export(args.out / "model", params, tokenizer, data, facts, args.device)
    print(f"done in {time.perf_counter() - args.began:.0f} s")


if __name__ == "__main__":
    main()
