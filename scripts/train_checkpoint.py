"""Files from which a training run goes on: weights, moments, and where the run stood."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from train_optimizer import Optimizer
from train_parameters import Params

SHARDS = 4


@dataclass
class Progress:
    """Where a run stands: everything that a resumed run needs beside weights and moments."""

    seed: int
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def save_checkpoint(folder: Path, params: Params, optimizer: Optimizer, progress: Progress) -> None:
    """Writes fp32 weights and bf16 moments as SHARDS files of about equal size."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"w/{n}": p.detach() for n, p in params.items()}
    tensors |= {n: m.bfloat16() for n, m in optimizer.moments().items()}
    shards: list[Params] = [{} for _ in range(SHARDS)]
    sizes = [0] * SHARDS
    for name, t in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        smallest = sizes.index(min(sizes))
        shards[smallest][name] = t.contiguous().cpu()
        sizes[smallest] += t.nbytes
    for index, shard in enumerate(shards):
        save_file(shard, folder / f"shard-{index}.safetensors", metadata={"progress": json.dumps(asdict(progress))})


def load_checkpoint(folder: Path, params: Params, optimizer: Optimizer) -> Progress:
    """Fills weights and moments from `folder`; returns where that run stood."""
    tensors: Params = {}
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, "pt") as shard:
            progress = Progress(**json.loads(shard.metadata()["progress"]))
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(tensors[f"w/{name}"])
    optimizer.load(tensors, progress.step)
    return progress
