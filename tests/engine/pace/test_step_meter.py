import pytest

from engine.pace.step_meter import PromptTokens, StepMeter


def test_speeds_are_zero_while_unknown() -> None:
    meter = StepMeter()
    assert (meter.prefill_tokens_per_second, meter.decode_step_ms, meter.decode_step_requests) == (None, None, None)


def test_steady_speeds_are_reported_as_they_are() -> None:
    meter = StepMeter()
    for _ in range(10):
        meter.observe_step(0.5, decoding=0, prompts=PromptTokens(1000))
        meter.observe_step(0.02, decoding=8)
    assert meter.prefill_tokens_per_second == pytest.approx(2000)
    assert meter.decode_step_ms == pytest.approx(20)


def test_a_tiny_prompt_hardly_moves_the_prefill_speed() -> None:
    meter = StepMeter()
    for _ in range(10):
        meter.observe_step(1.0, decoding=0, prompts=PromptTokens(2000))
    meter.observe_step(0.02, decoding=0, prompts=PromptTokens(1))
    assert meter.prefill_tokens_per_second == pytest.approx(2000, rel=0.01)


def test_the_decode_step_follows_a_change_within_some_hundred_steps() -> None:
    meter = StepMeter()
    for milliseconds in (10.0, 50.0):
        for _ in range(300):
            meter.observe_step(milliseconds / 1000, decoding=1)
    assert meter.decode_step_ms == pytest.approx(50, rel=0.02)


def test_the_decode_step_is_reported_with_its_batch_size() -> None:
    meter = StepMeter()
    for decoding in (4, 8) * 500:
        meter.observe_step(0.01, decoding=decoding)
    assert meter.decode_step_requests == pytest.approx(6, rel=0.02)
    meter.observe_step(0.5, decoding=0, prompts=PromptTokens(1000))
    assert meter.decode_step_requests == pytest.approx(6, rel=0.02)


def test_prompt_tokens_in_decode_steps_count_as_requests() -> None:
    meter = StepMeter()
    meter.observe_step(1.0, decoding=0, prompts=PromptTokens(2000))
    meter.observe_step(0.012, decoding=4, prompt_rows=30)
    assert meter.decode_step_ms == pytest.approx(12) and meter.decode_step_requests == 34
    assert meter.prefill_tokens_per_second == pytest.approx(2000)


@pytest.mark.parametrize("step_seconds", [0.001, 0.02, 0.1])
def test_one_prompt_does_not_make_decode_steps_slow(step_seconds: float) -> None:
    meter = StepMeter()
    for _ in range(300):
        meter.observe_step(step_seconds, decoding=4)
    meter.observe_step(0.3, decoding=4, prompts=PromptTokens(1500), quiet=False)
    # The prompt took a thirtieth of the last ten seconds.
    assert meter.decode_step_ms == pytest.approx(step_seconds * 1000, rel=0.035)
    assert meter.decode_step_requests == pytest.approx(4)


def test_steady_prompts_count_by_their_share_of_time() -> None:
    meter = StepMeter()
    for _ in range(300):
        for _ in range(5):
            meter.observe_step(0.02, decoding=4)
        meter.observe_step(0.12, decoding=4, prompts=PromptTokens(500), quiet=False)
    # Six tokens in 220 ms.
    assert meter.decode_step_ms == pytest.approx(220 / 6, rel=0.02)
    meter.observe_decode_steps([0.02] * 3000, decoding=4)
    assert meter.decode_step_ms == pytest.approx(20, rel=0.01)


def test_decode_steps_that_all_have_prompts_count_whole() -> None:
    meter = StepMeter()
    for _ in range(1000):
        meter.observe_step(0.12, decoding=4, prompts=PromptTokens(500), quiet=False)
        assert meter.decode_step_ms == pytest.approx(120)
    meter.observe_decode_steps([0.02] * 300, decoding=4)
    assert meter.decode_step_ms == pytest.approx(20, rel=0.01)
    for _ in range(1000):
        meter.observe_step(0.12, decoding=4, prompts=PromptTokens(500), quiet=False)
    assert meter.decode_step_ms == pytest.approx(120, rel=0.01)


def test_steps_observed_together_are_those_observed_one_by_one() -> None:
    together, alone = StepMeter(), StepMeter()
    for meter in (together, alone):
        meter.observe_step(0.02, decoding=4)
        meter.observe_step(0.12, decoding=4, prompts=PromptTokens(500), quiet=False)
    seconds = [0.02, 0.03, 0.001] * 50
    together.observe_decode_steps(seconds, decoding=4)
    for each in seconds:
        alone.observe_step(each, decoding=4)
    for name in ("decode_step_ms", "decode_step_requests", "prefill_tokens_per_second"):
        assert getattr(together, name) == getattr(alone, name) is not None


def test_one_delayed_quick_step_does_not_slow_the_mean() -> None:
    meter = StepMeter()
    for _ in range(3000):
        meter.observe_step(0.0003, decoding=1)
    meter.observe_step(0.02, decoding=1)
    assert meter.decode_step_ms == pytest.approx(0.3, rel=0.1)
