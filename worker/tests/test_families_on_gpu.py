"""Each family on a GPU: values near a CPU's, and the same bits whatever shares a step, is drafted, cached or captured.

transformers judges the families on a CPU, in their own tests; here the model on the CPU is the oracle.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)
from transformers import GraniteMoeHybridConfig as GraniteConfig
from transformers import GraniteMoeHybridForCausalLM as GraniteForCausalLM

from mambalign.engine import LLM, SamplingParams
from mambalign.worker.models.hybrid import HybridModel
from mambalign.worker.models.registry import FAMILIES, load_model
from mambalign.worker.tests import (
    nemotron_checkpoints,
    served,
    test_bamba,
    test_falcon_h1,
    test_granite_hybrid,
    test_lfm2,
    test_qwen,
    test_zamba2,
)
from mambalign.worker.tests.texts import (
    check_boundaries,
    check_every_cut,
    check_head_pieces,
    check_random_schedule,
    random_ids,
    run_whole,
)

DEVICE = "cuda"
VALUES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest logit; a GPU adds in another order

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def nemotron(name: str) -> Callable[[Path], Path]:
    return lambda folder: nemotron_checkpoints.write_checkpoint(folder, **nemotron_checkpoints.SMALL[name])


def written(model_class, config_class, sizes: dict) -> Callable[[Path], Path]:
    return lambda folder: served.write_checkpoint(folder, served.random_model(model_class, config_class, sizes))


def qwen(name: str) -> Callable[[Path], Path]:
    return lambda folder: test_qwen.build(folder, **test_qwen.SMALL[name])


CHECKPOINTS = {
    "nemotron_h": nemotron("odd"),
    "nemotron_h experts": nemotron("experts"),
    "nemotron_h latent": nemotron("latent"),
    "bamba": written(BambaForCausalLM, BambaConfig, next(iter(test_bamba.SMALL.values()))),
    "falcon_h1": written(FalconH1ForCausalLM, FalconH1Config, test_falcon_h1.SMALL["norm, then gate"]),
    "granitemoehybrid": written(GraniteForCausalLM, GraniteConfig, test_granite_hybrid.SMALL["nope"]),
    "granitemoehybrid experts": written(GraniteForCausalLM, GraniteConfig, test_granite_hybrid.SMALL["experts"]),
    "lfm2": written(Lfm2ForCausalLM, Lfm2Config, test_lfm2.SMALL["odd"]),
    "lfm2_moe": written(Lfm2MoeForCausalLM, Lfm2MoeConfig, test_lfm2.SMALL["experts"]),
    "qwen3_next": qwen("next_moe"),
    "qwen3_5": qwen("multimodal"),
    "qwen3_5_moe": qwen("moe"),
    "zamba2": written(Zamba2ForCausalLM, Zamba2Config, test_zamba2.SMALL["one block"]),
}
BY_CHUNKS_TOO = ("nemotron_h", "falcon_h1", "qwen3_next", "qwen3_5")  # each scan, by itself and with other layers
ALSO_IN_FP32 = ("falcon_h1", "nemotron_h experts", "qwen3_next")  # each kind of layer once


@pytest.fixture(scope="module", params=CHECKPOINTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CHECKPOINTS[name](tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def model(request: pytest.FixtureRequest, name: str, folder: Path) -> HybridModel:
    if request.param == torch.float32 and name not in ALSO_IN_FP32:
        pytest.skip("bf16 is what a GPU serves")
    return load_model(folder, request.param, DEVICE, show_progress=False)


@needs_gpu
@torch.inference_mode()
def test_logits_are_near_those_on_a_cpu(model: HybridModel, folder: Path) -> None:
    on_cpu = load_model(folder, torch.float32, show_progress=False)
    token_ids = random_ids(model, 90)
    ours = model.compute_logits(run_whole(model, token_ids)).cpu()
    theirs = on_cpu.compute_logits(run_whole(on_cpu, token_ids))
    is_near = (ours - theirs).abs().amax(1) < VALUES[model.dtype] * theirs.abs().max()
    rounded = model.dtype != torch.float32  # where a rounded score decides, a token goes to other experts
    assert is_near.float().mean() >= (0.8 if rounded else 1.0)


@needs_gpu
def test_bits_depend_on_the_text_alone(model: HybridModel) -> None:
    for seed, layout in enumerate(("SD", "DS")):
        check_random_schedule(model, layout, seed, lengths=[1, 2, 3, 63, 100, 129])
        check_boundaries(model, layout)
    check_every_cut(model)
    if model.has_mtp:
        check_head_pieces(model)


@needs_gpu
@pytest.mark.parametrize(("prefill_scan", "block_tokens"), [("recurrent", 16), ("chunked", 64)])
def test_served_alike_with_and_without_graphs_drafts_and_cache(
    name: str, folder: Path, prefill_scan: str, block_tokens: int
) -> None:
    if prefill_scan == "chunked" and name not in BY_CHUNKS_TOO:
        pytest.skip("runs the same kernels as another one")
    shared = [10 + i % 40 for i in range(5 * block_tokens // 2)]
    prompts = [shared + list(range(3, 3 + length)) for length in (1, 9, 30)] + [[5, 6, 7]]
    params = SamplingParams(max_tokens=40, temperature=0.0, logprobs=2, ignore_eos=True)
    settings = [
        dict(runner="v1", spec_tokens=0, enforce_eager=True, max_num_seqs=1, enable_prefix_caching=False),
        dict(runner="v1", spec_tokens=3, spec_method="ngram", mamba_conv_layout="DS", check_fused_copy=True),
        dict(runner="v2", spec_tokens=3, check_fused_copy=True),  # drafts from the head where there is one
    ]
    answers = []
    for options in settings:
        llm = LLM(
            str(folder), device=DEVICE, dtype="bfloat16", mamba_block_size=block_tokens, prefill_scan=prefill_scan,
            max_num_batched_tokens=block_tokens + 48, cache_memory=64 << 20, **{"max_num_seqs": 4, **options},
        )  # fmt: skip
        for _ in range(2):  # cold and warm
            results = llm.generate(prompts, params)
            answers.append([(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results])
        llm.shutdown()
    assert all(answer == answers[0] for answer in answers)


def test_every_family_is_here() -> None:
    assert {FAMILIES[name.split()[0]] for name in CHECKPOINTS} == {*FAMILIES.values()}
