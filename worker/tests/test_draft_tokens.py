"""Drafts from a copy of the head in fp8: mostly those of the head itself, and never a bit of the text."""

from pathlib import Path

import pytest
import torch

from mambalign.engine import LLM, SamplingParams
from mambalign.worker.models.registry import load_model
from mambalign.worker.tests import nemotron_checkpoints
from mambalign.worker.tests.texts import check_head_pieces

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
PROMPTS = [
    "import os\nimport sys\n\n\ndef read_lines(path):",
    "class Stack:\n    def __init__(self):",
    "x = [1, 2, 3]\n",
]
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, logprobs=2, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=60, temperature=0.7, seed=1, logprobs=2, ignore_eos=True)


@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_most_drafts_are_those_of_the_head_itself(tmp_path: Path, device: str) -> None:
    folder = nemotron_checkpoints.write_checkpoint(tmp_path / "model", **nemotron_checkpoints.SMALL["odd"])
    model = load_model(folder, torch.float32 if device == "cpu" else torch.bfloat16, device, show_progress=False)
    hidden = check_head_pieces(model)
    drafts = torch.full((len(hidden), 3), -7, device=device)
    model.draft_tokens(hidden, drafts[:, 0])
    model.quantize_draft_head()
    model.draft_tokens(hidden, drafts[:, 2])
    assert torch.equal(drafts[:, 0], model.mtp_logits(hidden).argmax(-1))
    assert (drafts[:, 1] == -7).all()
    assert (drafts[:, 0] == drafts[:, 2]).float().mean() > 0.7


def served(llm: LLM) -> tuple[list, float]:
    """Tokens and log-probabilities, and the share of drafts that were kept."""
    results = llm.generate(PROMPTS * 2, [GREEDY] * 3 + [SAMPLED] * 3)
    drafted, kept = (sum(getattr(r, f"num_{kind}_tokens") for r in results) for kind in ("draft", "accepted"))
    return [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results], kept / drafted


def check_served(llm_of_fp8: LLM, llm_of_model: LLM) -> None:
    (texts, kept), (want, kept_of_model) = served(llm_of_fp8), served(llm_of_model)
    assert texts == want
    assert kept > 0.8 * kept_of_model > 0.2
    llm_of_fp8.shutdown()
    llm_of_model.shutdown()


def test_the_text_is_the_same_on_a_cpu() -> None:
    """Which refuses the option, but runs the reference of the kernels."""
    engines = [LLM(device="cpu", spec_tokens=3, cache_memory=64 << 20, max_model_len=256) for _ in range(2)]
    engines[0].core.model.quantize_draft_head()
    check_served(*engines)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that multiplies fp8")
@pytest.mark.parametrize("options", [{"runner": "v2"}, {"runner": "v1", "enforce_eager": True}])
def test_the_text_is_the_same_on_a_gpu(options: dict) -> None:
    options = {"device": "cuda", "spec_tokens": 3, "cache_memory": 256 << 20, "max_model_len": 256} | options
    engines = [LLM(draft_head_dtype=dtype, **options) for dtype in ("fp8", "model")]
    is_said = ["drafts: 3 a step by mtp, head read in fp8" in llm.core.plan for llm in engines]
    assert is_said == [True, False]
    check_served(*engines)
