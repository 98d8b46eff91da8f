"""Checkpoints of any family written by transformers, and what each must pass: alone, and served by the engine."""

import shutil
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import mambalign.engine
from mambalign.engine import LLM, SamplingParams
from mambalign.engine.reference import ReferenceEngine
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.loader import DummyWeights
from mambalign.worker.models.registry import FAMILIES, load_model
from mambalign.worker.tests.texts import (
    assert_logits_close,
    check_boundaries,
    check_every_cut,
    check_logits,
    check_random_schedule,
    random_ids,
    run_whole,
)

DEFAULT_MODEL = Path(mambalign.engine.__file__).parent / "default_model"
SET_APART = ("norm.weight", "layernorm.weight", ".D", "dt_bias", ".bias")  # so that one that is forgotten shows
TIE = 1e-4  # of the largest logit: transformers' two best tokens are as good
NUM_TOKENS = 40


def random_model(
    model_class: type[PreTrainedModel], config_class: type[PreTrainedConfig], sizes: dict, seed: int = 0, **options
) -> PreTrainedModel:
    """A small model of transformers; `options` are further fields of its configuration."""
    torch.manual_seed(seed)
    if "layer_types" in sizes:
        options["num_hidden_layers"] = len(sizes["layer_types"])
    return model_class(config_class(**{"initializer_range": 0.2, "max_position_embeddings": 512} | sizes | options))


def load_oracle(folder: Path) -> PreTrainedModel:
    """What transformers makes of a checkpoint, in fp32."""
    eager = "eager"  # the grouped implementation of experts wants even sizes
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation=eager)
    return model.eval()


def write_checkpoint(folder: Path, model: PreTrainedModel, dtype: torch.dtype = torch.float32, **options) -> Path:
    """Save `model`, with random norms and biases, and the tokenizer of the model that ships."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(SET_APART):
            parameter.data.normal_(1.0, 0.5, generator=generator)
    model.to(dtype).save_pretrained(folder, **options)
    for file in DEFAULT_MODEL.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return folder


def check_alone(model: HybridModel, oracle: PreTrainedModel) -> None:
    """Logits are the oracle's; bits depend on neither pieces, batch, drafts nor layout."""
    check_logits(model, oracle)
    for seed, layout in enumerate(("SD", "DS")):
        check_random_schedule(model, layout, seed, lengths=[1, 2, 3, 63, 100, 129])
        check_boundaries(model, layout)
    check_random_schedule(model, "SD", seed=7, lengths=[9, 10, 11, 12, 13, 14, 15, 16, 17, 40, 41])
    check_every_cut(model)


def check_bfloat16(folder: Path, oracle: PreTrainedModel) -> None:
    """In bf16 logits are near the oracle's in fp32, and bits depend on the text alone."""
    model = load_model(folder, torch.bfloat16, show_progress=False)
    token_ids = random_ids(model, 50)
    with torch.inference_mode():
        ours, theirs = model.compute_logits(run_whole(model, token_ids)), oracle(torch.tensor([token_ids])).logits[0]
    assert_logits_close(ours, theirs, torch.bfloat16)
    check_random_schedule(model, "SD", seed=1, lengths=[5, 40, 61])


@torch.inference_mode()
def check_served(folder: Path, oracle: PreTrainedModel, spec_method: str | None = None) -> None:
    """Greedy texts through both runners, cold and warm, are transformers', ties aside, and the reference's bits.

    spec_method "mtp": the drafts of a random head, which are right by chance only; else some must be kept.
    """
    model = load_model(folder, torch.float32, show_progress=False)
    reference, head = ReferenceEngine(model), random_ids(model, 40)
    prompts = [head + random_ids(model, length, seed=length) for length in (1, 9, 30)] + [random_ids(model, 5)]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=2, ignore_eos=True)
    expected = [reference.generate(prompt, params) for prompt in prompts]
    for prompt, answer in zip(prompts, expected, strict=True):
        logits = oracle(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        taken = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (logits.max(1).values - taken).max() <= TIE * logits.abs().max()
    theirs = oracle.generate(torch.tensor(prompts[:1]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    ours = expected[0].token_ids
    same = [a == b for a, b in zip(ours, theirs[0, len(prompts[0]) :].tolist(), strict=True)]
    assert all(same) or _is_tie(oracle, prompts[0] + ours[: same.index(False)])
    for runner, layout in (("v1", "DS"), ("v2", "SD")):
        llm = LLM(
            str(folder), device="cpu", runner=runner, mamba_conv_layout=layout, spec_tokens=3, mamba_block_size=16,
            spec_method=spec_method, check_fused_copy=True, max_num_batched_tokens=48, max_num_seqs=4,
            cache_memory=64 << 20,
        )  # fmt: skip
        for is_warm in (False, True):
            results = llm.generate(prompts, params)
            for result, want in zip(results, expected, strict=True):
                assert result.outputs[0].token_ids == want.token_ids
                assert result.outputs[0].logprobs == want.logprobs
            assert sum(result.num_draft_tokens for result in results) > 0
            assert spec_method == "mtp" or sum(result.num_accepted_tokens for result in results) > 0
            assert all(result.num_cached_tokens >= 32 for result in results[:3]) == is_warm
        llm.shutdown()


def _is_tie(oracle: PreTrainedModel, token_ids: list[int]) -> bool:
    """Whether the oracle's two best tokens after `token_ids` are as good."""
    best = oracle(torch.tensor([token_ids])).logits[0, -1].topk(2).values
    return bool(best[0] - best[1] <= TIE * best.abs().max())


class CountingWeights(DummyWeights):
    """Weights on no device that count what a model takes."""

    def __init__(self, is_tied: bool):
        super().__init__(torch.bfloat16, "meta", is_tied)
        self.num_parameters = 0

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        self.num_parameters += prod(shape)
        return super().take(name, shape, dtype)


def count_parameters(config: dict[str, Any]) -> int:
    """Parameters of the model that a config.json describes."""
    family = FAMILIES[config["model_type"]]
    parsed = family.Config.from_json(config)
    weights = CountingWeights(parsed.tie_word_embeddings)
    family(parsed, weights)
    return weights.num_parameters
