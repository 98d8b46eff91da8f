"""What config.json says of rotary positions: both notations, each scaling against transformers, and what is refused."""

import pytest
import torch
from transformers import BambaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mambalign.worker.models.loader import CheckpointError
from mambalign.worker.models.rotary import Rotary, RotaryConfig, frequencies

SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn, all fields": {
        "factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False,
        "mscale": 0.7, "mscale_all_dim": 1.2,
    },
    "yarn, attention factor": {"factor": 2.0, "original_max_position_embeddings": 512, "attention_factor": 1.5},
}  # fmt: skip


@pytest.mark.parametrize("theta", [500.0, 1e4, 1e11])
@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_are_those_of_transformers(name: str, theta: float) -> None:
    kind = name.split(",")[0]
    parameters = {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": 0.5, **SCALINGS[name]}
    config = BambaConfig(
        hidden_size=4 * 48, num_attention_heads=4, mamba_n_heads=4, max_position_embeddings=1024,
        rope_parameters=dict(parameters),
    )  # fmt: skip
    want, want_scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    got, scale = frequencies(RotaryConfig.from_json({"rope_parameters": parameters}, 48, 1024))
    torch.testing.assert_close(got, want, atol=0.0, rtol=1e-6)
    assert scale == pytest.approx(want_scale)


def test_both_notations_say_the_same() -> None:
    scaling = {"factor": 2.0, "beta_fast": 16.0}
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", **scaling}, "partial_rotary_factor": 0.25}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "partial_rotary_factor": 0.25, **scaling}}
    parsed = RotaryConfig.from_json(old, 64, 128)
    assert parsed == RotaryConfig.from_json(new, 64, 128)
    assert (parsed.theta, parsed.rotary_dim, parsed.kind, parsed.factor) == (500.0, 16, "yarn", 2.0)
    plain = RotaryConfig.from_json({"rope_scaling": None, "rope_theta": None}, 64, 128, partial_rotary_factor=0.5)
    assert (plain.theta, plain.rotary_dim, plain.kind) == (10_000.0, 32, "default")


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type = 'dynamic'; served: default, linear, llama3, yarn"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, "'llama3' without high_freq_factor"),
        ({"partial_rotary_factor": 0.2}, "rotary positions over 3 channels"),
        ({"rope_theta": "10000"}, "rope_theta = '10000'; served: positive numbers"),
        ({"rope_theta": 0}, "rope_theta = 0; served: positive numbers"),
        ({"rope_type": "linear", "factor": -2.0}, "factor = -2.0; served: positive numbers"),
        ({"full_attention": {"rope_theta": 5e5}}, "served: the same for all layers"),
        (["default"], "served: the same for all layers"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(parameters: dict, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        Rotary(RotaryConfig.from_json({"rope_parameters": parameters}, 16, 128), "cpu")
