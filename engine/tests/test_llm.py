"""`LLM` around the fake core: prompts in every form, n, errors, leaving early."""

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from fake_core import CRASH, ERROR, FakeCore

from mambalign.engine import LLM, ConfigError, SamplingParams
from mambalign.engine.config import EngineConfig
from mambalign.engine.errors import EngineError
from mambalign.engine.local_client import LocalClient
from mambalign.engine.request_factory import RequestFactory


@pytest.fixture
def llm(fake_model: Path) -> LLM:
    config = EngineConfig.from_options(model=str(fake_model), spec_tokens=1)
    return LLM(str(fake_model), core=FakeCore(config), spec_tokens=1)


def test_text_and_token_ids(llm: LLM) -> None:
    (by_text,) = llm.generate("abc", SamplingParams(max_tokens=4, logprobs=2))
    (by_ids,) = llm.generate(by_text.prompt_token_ids, SamplingParams(max_tokens=4))
    assert by_text.prompt == "abc" and by_ids.prompt is None
    assert by_text.num_cached_tokens == 0 and by_ids.num_cached_tokens == 2
    for result in (by_text, by_ids):
        (output,) = result.outputs
        assert output.text == "abca" and output.finish_reason == "length"
        assert output.token_ids == [*result.prompt_token_ids, result.prompt_token_ids[0]]
        assert (output.num_draft_tokens, output.num_accepted_tokens) == (4, 3)
        assert (result.num_draft_tokens, result.num_accepted_tokens) == (4, 3)
    assert len(by_text.outputs[0].logprobs) == 4 and by_ids.outputs[0].logprobs is None


def test_many_prompts_keep_their_order(llm: LLM) -> None:
    prompts = ["ab", "c", "def"]
    lengths = [SamplingParams(max_tokens=n) for n in (6, 1, 3)]
    assert [r.outputs[0].text for r in llm.generate(prompts, lengths)] == ["ababab", "c", "def"]
    ids = [r.prompt_token_ids for r in llm.generate(prompts)]
    assert [len(r.outputs[0].token_ids) for r in llm.generate(ids)] == [16, 16, 16]
    assert llm.generate([]) == []


def test_n_and_stop(llm: LLM) -> None:
    (result,) = llm.generate("abc", SamplingParams(max_tokens=9, n=3, stop=["ca"]))
    assert [o.index for o in result.outputs] == [0, 1, 2]
    assert {(o.text, o.finish_reason, o.stop_reason) for o in result.outputs} == {("ab", "stop", "ca")}


def test_mistakes_name_the_field_and_leave_nothing_behind(llm: LLM) -> None:
    for prompts, params, words in [
        ("abc", SamplingParams(top_p=2), "top_p"),
        (["abc", []], SamplingParams(), "prompt"),
        ([3.5], SamplingParams(), "prompts"),
        (["a", "b"], [SamplingParams()], "params: 1 for 2 prompts"),
    ]:
        with pytest.raises(ValueError, match=words):
            llm.generate(prompts, params)
        llm.core.check()
    with pytest.raises(EngineError, match="told to fail"):
        llm.generate([[100], [ERROR]])
    llm.core.check()
    with pytest.raises(RuntimeError, match="told to crash"):
        llm.generate([CRASH])


def test_leaving_early_aborts(llm: LLM) -> None:
    outputs = LocalClient(llm.core).generate(RequestFactory(0).split([100], SamplingParams(n=2)))
    next(outputs)
    outputs.close()
    llm.core.check()


def test_shutdown_and_leaving_the_context_let_go_of_the_engine(llm: LLM) -> None:
    core = weakref.ref(llm.core)
    with llm as same:
        assert same is llm and llm.generate("abc", SamplingParams(max_tokens=3))[0].outputs[0].text == "abc"
        llm.shutdown()
    llm.shutdown()
    assert core() is None
    for ask in (llm.generate, llm.chat):
        with pytest.raises(RuntimeError, match="shut down"):
            ask("abc")


def test_the_progress_bar_counts_texts_and_tokens(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["ab", "c"], SamplingParams(max_tokens=4, n=2), use_tqdm=True)
    shown = capsys.readouterr().err
    assert "4/4 [" in shown and " tokens/s]" in shown
    llm.generate(["ab", "c"])
    assert capsys.readouterr().err == "", "on a terminal only"


def test_options_are_refused_before_torch_is_imported() -> None:
    with pytest.raises(ConfigError, match="spec_token"):
        LLM(spec_token=3)
    code = (
        "import sys; from mambalign.engine import LLM, SamplingParams, ConfigError\n"
        "try: LLM(spec_tokens=9)\n"
        "except ConfigError: assert 'torch' not in sys.modules\n"
        "else: raise SystemExit(3)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
