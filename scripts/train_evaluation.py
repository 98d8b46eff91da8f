"""Figures and files of a trained network: held-out loss, draft acceptance, samples, and the shipped folder.

Everything here runs on the weights as they are shipped (rounded to bf16) in fp32, except `quick_loss`.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from train_corpus import BOS, EOS, TokenStream
from train_network import MTP_DEPTHS, Network, linear
from train_parameters import CONFIG, Params

PROMPT_TOKENS, NEW_TOKENS, PROMPTS = 128, 128, 64
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '# assistant:\\n' + message['content'] + '\\n\\n' }}"
    "{% else %}{{ '# ' + message['role'] + ': ' + message['content'] | replace('\\n', '\\n# ') + '\\n\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '# assistant:\\n' }}{% endif %}"
)
TOKENIZER_CONFIG = {
    "backend": "tokenizers",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "model_max_length": CONFIG["max_position_embeddings"],
    "tokenizer_class": "TokenizersBackend",
    "chat_template": CHAT_TEMPLATE,
}
GENERATION_CONFIG = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": CONFIG["pad_token_id"]}
SAMPLE_PROMPTS = (
    "import os\nimport sys\n\n\ndef read_lines(path):",
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):',
    "def test_split_words():",
)

CARD = """---
license: apache-2.0
pipeline_tag: text-generation
---
# The default model of Mambalign

A small hybrid language model of Python source in the `nemotron_h` format: Mamba-2, attention and MLP layers, and a
multi-token-prediction (MTP) head. It exists so that a serving engine for such models has something real to run on
any machine: it predicts well enough that drafts are accepted. It is a base model and knows nothing but Python text;
do not rely on what it writes.

## Format

Loads as `NemotronHForCausalLM` (which ignores `mtp.*`). bf16; untied head; no rotary embedding; `time_step_min` 1e-6,
because transformers clamps dt there and other engines do not. Byte-level BPE of 4,096. Documents were
`<s> text </s>`; the tokenizer adds neither by itself. The chat template writes system and user turns as comments
(`# user: ...`) and assistant turns, after `# assistant:`, as code.

## The MTP head, exactly

For position p: `x = eh_proj(concat(enorm(E[token p+1]), hnorm(h_p)))`, with E the main embedding table and h_p the
main model's hidden state *after* `backbone.norm_f`. Then one attention layer (`mtp.layers.0`), one MLP layer
(`mtp.layers.1`), both residual, and `f = final_layernorm(x)`. Draft 1, the token p+2, is the argmax of
`lm_head(f)` (the main head). Draft d+1 repeats this with the draft-d token's embedding and, in place of h_p, the
head's own `f` of draft d: the tensor *after* `final_layernorm`, through `hnorm` again. Its attention sees the keys
and values that main-model states gave at earlier positions, and those of the drafts before it in the same chain.

## Training

`scripts/train_default_model.py`, seed {seed}: {step} steps, {millions:.0f} M tokens ({epochs:.1f} epochs of
{train_tokens} tokens) in {seconds:.0f} s on one H200 ({rate:.2f} M tokens a second, compilation not counted).
Rows of 1,024 tokens, every sixth step rows of 4,096. Muon for matrices, Adam for the rest. Loss: main + 0.25 / 0.15 /
0.10 for drafts 1 / 2 / 3, half true token, half the main model's distribution.

## Figures

Held-out files (1 in 200, by a hash of their path; copies of a text are removed, but near-copies between packages
remain), {bytes_per_token:.2f} bytes a token, weights as shipped, computed in fp32:

| tokens a row | nats a token | bits a byte | top-1 |
|---|---|---|---|
{table}

Teacher-forced acceptance of drafts 1 / 2 / 3, each given that those before it were kept: {accept}. Greedy
draft-and-verify with 3 drafts, {rows} held-out prompts of 128 tokens, 128 new ones: {tokens_a_step_all:.2f} tokens
a step; {tokens_a_step_not_looping:.2f} over the {rows_not_looping} rows in which no 12-token string occurs three times.

## Samples (temperature 0.7)

{shown}

## Data

Python files of these, by the licence in their metadata: {packages}.
"""


def rows_of(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """The stream as [rows, length + MTP_DEPTHS + 1], rows starting every `length` tokens."""
    count = (len(tokens) - MTP_DEPTHS - 1) // length
    starts = torch.arange(count, device=tokens.device)[:, None] * length
    return tokens[starts + torch.arange(length + MTP_DEPTHS + 1, device=tokens.device)]


def quick_loss(net: Network, held_out: torch.Tensor, count: int, length: int) -> float:
    """Mean loss of one batch of held-out rows in the training shape (so that nothing compiles anew)."""
    rows = rows_of(held_out, length)
    rows = rows[torch.arange(count, device=rows.device) % len(rows)]
    return net.main(net.embed(rows[:, :length]), rows[:, 1 : length + 1])[0].mean().item()


@torch.no_grad()
def held_out_loss(net: Network, held_out: torch.Tensor, length: int) -> tuple[float, float]:
    """(nats a token, top-1 rate) over all held-out rows of one length."""
    loss = hits = count = 0.0
    for rows in rows_of(held_out, length).split(max(1, 16384 // length)):
        each, _, logits = net.main(net.embed(rows[:, :length]), rows[:, 1 : length + 1])
        loss += each.sum().item()
        hits += (logits.argmax(-1) == rows[:, 1 : length + 1]).sum().item()
        count += each.numel()
    return loss / count, hits / count


def draft_hits(net: Network, rows: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(agrees, true) [MTP_DEPTHS,B,T] of rows [B, length + 4]: does draft d of position p equal the main model's
    argmax after token p+1+d, and does it equal the true token there. The last places of a row are undefined."""
    _, h, logits = net.main(net.embed(rows[:, :length]), rows[:, 1 : length + 1])
    best = logits.argmax(-1)
    agrees, true = [], []
    for depth, output in enumerate(net.drafts(h, net.embed(rows))):
        draft = linear(output, net.params["lm_head.weight"]).argmax(-1)
        agrees.append(draft == best.roll(-1 - depth, 1))
        true.append(draft == rows[:, depth + 2 : depth + 2 + length])
    return torch.stack(agrees), torch.stack(true)


@torch.no_grad()
def acceptance(net: Network, held_out: torch.Tensor, length: int = 512) -> list[float]:
    """Teacher-forced acceptance by draft position: how often draft d is the main model's choice, given that
    the drafts before it were kept and were the text."""
    kept, asked = [0] * MTP_DEPTHS, [0] * MTP_DEPTHS
    for rows in rows_of(held_out, length).split(16):
        agrees, true = draft_hits(net, rows, length)
        alive = torch.ones_like(agrees[0])
        alive[:, length - MTP_DEPTHS :] = False
        for depth in range(MTP_DEPTHS):
            asked[depth] += int(alive.sum())
            kept[depth] += int((alive & agrees[depth]).sum())
            alive &= agrees[depth] & true[depth]
    return [k / max(1, a) for k, a in zip(kept, asked, strict=True)]


@torch.no_grad()
def generate(net: Network, rows: torch.Tensor, new_tokens: int, temperature: float, seed: int = 0) -> torch.Tensor:
    """Rows [B,P] continued by `new_tokens`; greedy at temperature 0. Runs the whole row for every token."""
    gen = torch.Generator(rows.device).manual_seed(seed)
    start, length = rows.shape[1], -(-(rows.shape[1] + new_tokens) // 64) * 64
    text = torch.nn.functional.pad(rows, (0, length - start))
    for at in range(start, start + new_tokens):
        x = net.backbone(net.embed(text))[:, at - 1 : at]
        logits = net.main_head(x, net.params["backbone.norm_f.weight"], net.params["lm_head.weight"], text[:, :1])[2]
        if temperature > 0:
            text[:, at] = torch.multinomial((logits[:, 0] / temperature).softmax(-1), 1, generator=gen)[:, 0]
        else:
            text[:, at] = logits[:, 0].argmax(-1)
    return text[:, : start + new_tokens]


def loops(tokens: list[int]) -> bool:
    """Whether some 12 tokens in a row occur three times or more."""
    seen: dict[tuple[int, ...], int] = {}
    for i in range(len(tokens) - 11):
        key = tuple(tokens[i : i + 12])
        seen[key] = seen.get(key, 0) + 1
    return max(seen.values(), default=0) >= 3


@torch.no_grad()
def draft_and_verify(net: Network, held_out: torch.Tensor) -> dict[str, float]:
    """Tokens a step of greedy decoding with MTP_DEPTHS drafts on held-out prompts. The text is the main model's
    own, so drafts of every position come from one pass over it; the steps are then counted along each row."""
    stride = len(held_out) // PROMPTS
    prompts = held_out[
        torch.arange(PROMPTS, device=held_out.device)[:, None] * stride
        + torch.arange(PROMPT_TOKENS, device=held_out.device)
    ]
    text = generate(net, prompts, NEW_TOKENS + MTP_DEPTHS + 1, 0.0)
    length = PROMPT_TOKENS + NEW_TOKENS
    agrees = draft_hits(net, text, length)[0].cpu().numpy()
    steps = {"all": 0, "not_looping": 0}
    tokens = {"all": 0, "not_looping": 0}
    plain = 0
    for row in range(PROMPTS):
        looping = loops(text[row, PROMPT_TOKENS:length].tolist())
        plain += not looping
        at = PROMPT_TOKENS - 1  # the last position whose next token is known
        while at < length - MTP_DEPTHS - 1:
            hits = agrees[:, row, at]
            taken = 1 + int(np.cumprod(hits).sum())
            for kind in ("all", "not_looping")[: 1 if looping else 2]:
                steps[kind] += 1
                tokens[kind] += taken
            at += taken
    means = {f"tokens_a_step_{kind}": tokens[kind] / max(1, steps[kind]) for kind in steps}
    return means | {"rows": PROMPTS, "rows_not_looping": plain}


def samples(net: Network, tokenizer: Tokenizer, device: str) -> list[str]:
    """Sampled continuations (temperature 0.7) of fixed prompts, as text."""
    texts = []
    for seed, prompt in enumerate(SAMPLE_PROMPTS):
        ids = torch.tensor([[BOS, *tokenizer.encode(prompt).ids]], device=device)
        texts.append(tokenizer.decode(generate(net, ids, 160, 0.7, seed)[0].tolist()))
    return texts


def evaluate(net: Network, data: TokenStream, tokenizer: Tokenizer, device: str) -> dict[str, Any]:
    """All figures of the model card."""
    held_out = torch.from_numpy(data.held_out.astype(np.int64)).to(device)
    report: dict[str, Any] = {"bytes_per_token": data.held_out_bytes / len(data.held_out)}
    for length in (512, 1024, 4096):
        if len(held_out) > 2 * length:
            loss, top1 = held_out_loss(net, held_out, length)
            bits = loss / math.log(2) / report["bytes_per_token"]
            report[f"rows_of_{length}"] = {"nats_per_token": loss, "bits_per_byte": bits, "top1": top1}
    report["acceptance"] = acceptance(net, held_out)
    report |= draft_and_verify(net, held_out)
    report["samples"] = samples(net, tokenizer, device)
    return report


def card(report: dict[str, Any]) -> str:
    """README.md of the model folder: what it is, how it was made, how well it does, and what it is not."""
    figures = {length: report[f"rows_of_{length}"] for length in (512, 1024, 4096) if f"rows_of_{length}" in report}
    table = "\n".join(
        f"| {n} | {f['nats_per_token']:.3f} | {f['bits_per_byte']:.3f} | {f['top1']:.3f} |" for n, f in figures.items()
    )
    packages = ", ".join(f"{name} ({licence})" for name, licence in sorted(report["packages"].items()))
    values = report | {
        "table": table,
        "packages": packages,
        "accept": " / ".join(f"{a:.3f}" for a in report["acceptance"]),
        "millions": report["tokens"] / 1e6,
        "epochs": report["tokens"] / report["train_tokens"],
        "rate": report["tokens"] / report["seconds"] / 1e6,
        "shown": "\n\n".join(f"```python\n{text}\n```" for text in report["samples"]),
    }
    return CARD.format_map(values)


def export(
    folder: Path, params: Params, tokenizer: bytes, data: TokenStream, facts: dict[str, Any], device: str
) -> None:
    """Writes the model folder (bf16 weights), then its figures to report.json beside the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().bfloat16().contiguous().cpu() for name, p in params.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_bytes(tokenizer)
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
    torch.set_float32_matmul_precision("highest")
    shipped = Network({n: w.float().to(device) for n, w in weights.items()}, torch.float32, compiled=False)
    report = facts | evaluate(shipped, data, Tokenizer.from_str(tokenizer.decode()), device)
    (folder / "README.md").write_text(card(report))
    (folder.parent / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k not in ("packages", "samples")}, indent=1))
    print("\n\n=== sample ===\n".join(["", *report["samples"]]))
