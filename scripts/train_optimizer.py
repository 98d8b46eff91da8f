"""The optimiser of `train_default_model.py`: Muon for matrices, AdamW for the rest, and how fast each learns."""

import torch
from train_parameters import CONFIG, Params

MATRIX_LR, MATRIX_DECAY, MATRIX_MOMENTUM = 0.02, 0.01, 0.95
EMBEDDING_LR, HEAD_LR, VECTOR_LR = 0.15, 0.01, 0.015


def orthogonalise(g: torch.Tensor) -> torch.Tensor:
    """Nearest semi-orthogonal matrices of a stack [n,r,c], r <= c, by five Newton-Schulz steps (Muon, Jordan 2024)."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon:
    """Momentum whose matrix updates are orthogonalised; a fused in_proj is taken apart into its five matrices."""

    def __init__(self, params: Params, compiled: bool) -> None:
        self.params = params
        self.momentum = {name: torch.zeros_like(p) for name, p in params.items()}
        self.orthogonalise = torch.compile(orthogonalise, dynamic=False) if compiled else orthogonalise
        self.groups: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        for name, p in params.items():
            start = 0
            for rows in self.row_split(name, p):
                shape = (min(rows, p.shape[1]), max(rows, p.shape[1]))
                self.groups.setdefault(shape, []).append((name, start, rows))
                start += rows

    @staticmethod
    def row_split(name: str, p: torch.Tensor) -> list[int]:
        """Rows of the matrices stacked in one weight: in_proj is gate, x, B, C and dt."""
        if not name.endswith("in_proj.weight"):
            return [p.shape[0]]
        inner = CONFIG["mamba_num_heads"] * CONFIG["mamba_head_dim"]
        state = CONFIG["n_groups"] * CONFIG["ssm_state_size"]
        return [inner, inner, state, state, CONFIG["mamba_num_heads"]]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` times the peak learning rate; clears the gradients."""
        names = list(self.params)
        weights = [self.params[n] for n in names]
        grads = [p.grad for p in weights]
        torch._foreach_lerp_([self.momentum[n] for n in names], grads, 1 - MATRIX_MOMENTUM)
        torch._foreach_lerp_(grads, [self.momentum[n] for n in names], MATRIX_MOMENTUM)
        torch._foreach_mul_(weights, 1 - scale * MATRIX_LR * MATRIX_DECAY)
        for members in self.groups.values():
            parts = [self.params[n].grad[start : start + rows] for n, start, rows in members]
            flips = [part.shape[0] > part.shape[1] for part in parts]
            stack = torch.stack([p.mT if f else p for p, f in zip(parts, flips, strict=True)])
            for update, flip, (name, start, rows) in zip(self.orthogonalise(stack), flips, members, strict=True):
                target = self.params[name][start : start + rows]
                rate = scale * MATRIX_LR * max(1.0, rows / target.shape[1]) ** 0.5
                target.add_((update.mT if flip else update).float(), alpha=-rate)
        for p in weights:
            p.grad = None


class Optimizer:
    """Muon for the matrices, AdamW (no decay) for embeddings, head, vectors and convolutions."""

    def __init__(self, params: Params, compiled: bool) -> None:
        tables = ("backbone.embeddings.weight", "lm_head.weight")
        self.params = params
        self.muon = Muon({n: p for n, p in params.items() if p.ndim == 2 and n not in tables}, compiled)
        vectors = [p for n, p in params.items() if p.ndim != 2]
        self.groups = [
            {"params": [params[tables[0]]], "peak": EMBEDDING_LR},
            {"params": [params[tables[1]]], "peak": HEAD_LR},
            {"params": vectors, "peak": VECTOR_LR},
        ]
        fused = next(iter(params.values())).is_cuda
        self.adam = torch.optim.AdamW(self.groups, lr=0.0, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused)

    def step(self, scale: float) -> None:
        """One update at `scale` times the peak learning rates; clears the gradients."""
        self.muon.step(scale)
        for group in self.adam.param_groups:
            group["lr"] = scale * group["peak"]
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def moments(self) -> Params:
        """Every moment by name, 'm/...' and 'v/...'."""
        found = {f"m/{n}": m for n, m in self.muon.momentum.items()}
        for name, p in self.params.items():
            if state := self.adam.state.get(p):
                found[f"m/{name}"], found[f"v/{name}"] = state["exp_avg"], state["exp_avg_sq"]
        return found

    def load(self, moments: Params, steps: int) -> None:
        """Takes moments back that `moments` gave after `steps` updates."""
        for name, p in self.params.items():
            m = moments[f"m/{name}"].to(p.device, torch.float32)
            if name in self.muon.momentum:
                self.muon.momentum[name].copy_(m)
            else:
                v = moments[f"v/{name}"].to(p.device, torch.float32)
                count = torch.tensor(float(steps), device=p.device if p.is_cuda else "cpu")
                self.adam.state[p] = {"step": count, "exp_avg": m, "exp_avg_sq": v}
