"""`LLM` around the fake core: prompts in every form, n, errors, leaving early."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from fake_core import CRASH, ERROR, FakeCore

from mambalign.engine import LLM, ConfigError, SamplingParams
from mambalign.engine.config import EngineConfig
from mambalign.engine.errors import EngineDeadError, EngineError
from mambalign.engine.local_client import LocalClient
from mambalign.engine.messages import EngineOutput
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
        ([3.5], SamplingParams(), r"prompts\[0\]"),
        ([[100], [100, 1.5]], SamplingParams(), r"prompts\[1\]: token ids must be integers, got 1.5"),
        ([[None]], SamplingParams(), "got None"),
        ([True], SamplingParams(), "got True"),
        (["a", "\ud800"], SamplingParams(), r"prompts\[1\]: is no Unicode text"),
        ({"prompt": "abc"}, SamplingParams(), "prompts: .*got dict"),
        (None, SamplingParams(), "prompts: .*got NoneType"),
        (b"abc", SamplingParams(), "prompts: .*got bytes"),
        (["a", "b"], [SamplingParams()], "params: 1 for 2 prompts"),
        ("a", {"max_tokens": 3}, "params: .*got dict"),
        ("a", [None], r"params\[0\]: must be SamplingParams, got NoneType"),
    ]:
        with pytest.raises(ValueError, match=words):
            llm.generate(prompts, params)
        llm.core.check()
    with pytest.raises(EngineError, match="told to fail"):
        llm.generate([[100], [ERROR]])
    llm.core.check()


def test_prompts_and_params_may_be_generators(llm: LLM) -> None:
    lengths = (SamplingParams(max_tokens=n) for n in (2, 3))
    results = llm.generate((prompt for prompt in ("ab", "cd")), lengths)
    assert [result.outputs[0].text for result in results] == ["ab", "cdc"]


def test_a_failed_step_is_told_again_and_again(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="told to crash"):
        llm.generate([CRASH])
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=r"failed in an earlier step .*told to crash"):
            llm.generate("abc")


def test_an_interrupt_waits_for_the_end_of_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, ends = llm.core.step, []

    def interrupted_step() -> list[EngineOutput]:
        if not ends:
            os.kill(os.getpid(), signal.SIGINT)
        outputs = step()
        ends.append(len(outputs))
        return outputs

    monkeypatch.setattr(llm.core, "step", interrupted_step)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate(["abc", "de"], SamplingParams(max_tokens=9))
    assert ends == [2, 2], "the step, and the one that brings the endings of the aborted requests"
    assert signal.getsignal(signal.SIGINT) is handler
    llm.core.check()
    assert llm.generate("abc", SamplingParams(max_tokens=3))[0].outputs[0].text == "abc"
    del caught


def test_a_second_interrupt_does_not_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def hanging_step() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(llm.core, "step", hanging_step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc")
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        llm.generate("abc")


def test_threads_take_turns(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: dict[str, str] = {}
    step = llm.core.step

    def step_beside_others() -> list[EngineOutput]:
        time.sleep(0.001)  # the others run meanwhile
        return step()

    def complete(prompt: str) -> None:
        texts[prompt] = llm.generate([prompt] * 4, SamplingParams(max_tokens=9))[3].outputs[0].text

    monkeypatch.setattr(llm.core, "step", step_beside_others)

    threads = [threading.Thread(target=complete, args=(prompt,)) for prompt in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {prompt: prompt * 9 for prompt in "abcdefgh"}


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
