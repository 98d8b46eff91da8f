"""The shipped model: small, in the published format, loadable by transformers, and writing Python."""

import inspect
import io
import json
import math
import textwrap
import tokenize
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, NemotronHForCausalLM

FOLDER = Path(__file__).parents[1] / "default_model"
LIMIT_BYTES = 16_000_000
PARAMETERS = (6_000_000, 7_800_000)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def loaded():
    model, info = NemotronHForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, output_loading_info=True)
    return model.eval(), info


def weight_shapes() -> dict[str, tuple[int, ...]]:
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert all(file.get_slice(name).get_dtype() == "BF16" for name in file.keys())
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def test_folder_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(files) >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "README.md",
    }
    assert sum(files.values()) <= LIMIT_BYTES


def test_weights_are_published_names_and_the_promised_number():
    shapes = weight_shapes()
    config = json.loads((FOLDER / "config.json").read_text())
    assert PARAMETERS[0] <= sum(map(math.prod, shapes.values())) <= PARAMETERS[1]
    assert config["num_nextn_predict_layers"] == 1
    assert config["time_step_min"] == 1e-6  # transformers clamps dt there, other engines do not
    dim = config["hidden_size"]
    assert shapes["mtp.layers.0.eh_proj.weight"] == (dim, 2 * dim)
    assert shapes["mtp.layers.1.final_layernorm.weight"] == (dim,)


def test_transformers_takes_every_weight_but_the_mtp_head(loaded):
    model, info = loaded
    assert type(model).__name__ == "NemotronHForCausalLM"
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in info["unexpected_keys"])
    taken = {name for name in weight_shapes() if not name.startswith("mtp.")}
    named = {name.replace("model.", "backbone.", 1) if name.startswith("model.") else name for name in taken}
    assert len(named) == len(list(model.parameters()))


def python_share(text: str) -> float:
    """Share of the lines of `text` that the tokenizer of Python reads before it finds an error."""
    lines = text.count("\n") + 1
    last = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in (tokenize.ERRORTOKEN, tokenize.ENDMARKER):
                last = max(last, token.end[0])
    except (tokenize.TokenError, IndentationError, SyntaxError) as error:
        if "EOF in multi-line" in str(error):  # cut off inside a string or bracket by the token limit
            return 1.0
    return last / lines


def test_greedy_continuation_of_the_standard_library_reads_as_python(loaded, tokenizer):
    model, _ = loaded
    prompt = inspect.getsource(textwrap)[:600]
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
    text = tokenizer.decode(out)
    assert len(set(out.tolist())) > 8
    assert python_share(prompt + text) > 0.9


def test_loss_on_a_prompt_module_is_that_of_a_trained_model(loaded, tokenizer):
    model, _ = loaded
    text = inspect.getsource(textwrap)[:2500]
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])
    with torch.no_grad():
        nats = model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    assert nats / math.log(2) / len(text.encode()) < 1.2


def test_tokenizer_round_trips_and_adds_nothing(tokenizer):
    text = "def f(x):\n\treturn 'é∂' + x  # ok\r\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not {0, 1, 2} & set(ids)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == 4096


def test_chat_template_renders(tokenizer):
    messages = [
        {"role": "system", "content": "Write Python."},
        {"role": "user", "content": "Add two numbers.\nBe brief."},
        {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
        {"role": "user", "content": "Now subtract."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<s># system: Write Python.\n\n# user: Add two numbers.\n# Be brief.\n\n"
        "# assistant:\ndef add(a, b):\n    return a + b\n\n# user: Now subtract.\n\n# assistant:\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
