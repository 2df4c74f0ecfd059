from engine.protocol.pulse import LoopProgress, Pulse
from worker.watchdog import Stall, Watchdog, blamed

TICK = 0.5


def observed(*readings: LoopProgress) -> Stall:
    """What a watchdog says after these readings, half a second apart."""
    watchdog = Watchdog()
    stalls = [watchdog.observe(reading, TICK) for reading in readings]
    return stalls[-1]


def beating(count: int, step_loop: int = 0, transfer: int = 0, longest_step_ms: int = 0) -> list[LoopProgress]:
    """Readings of a process that runs, whose threads do not go on."""
    return [LoopProgress(beats, step_loop, transfer, longest_step_ms) for beats in range(count)]


def test_a_rank_that_waits_for_work_is_not_stalled() -> None:
    assert observed(*beating(20)).seconds == 0
    assert observed(*beating(20, step_loop=4, transfer=6)).seconds == 0


def test_a_process_without_a_heartbeat_is_stalled_since_its_last() -> None:
    readings = [*beating(3), *[LoopProgress(2, 0, 0, 0)] * 4]
    assert observed(*readings) == Stall(4 * TICK, "its process does not run", is_first=True)


def test_a_step_beyond_the_announced_longest_is_a_stall() -> None:
    assert observed(*beating(7, step_loop=3, longest_step_ms=3000)).seconds == 0
    assert observed(*beating(11, step_loop=3, longest_step_ms=3000)) == Stall(2.0, "its step does not end")


def test_steps_that_follow_each_other_are_progress() -> None:
    readings = [LoopProgress(beats, 2 * beats + 1, 0, 100) for beats in range(30)]
    assert observed(*readings).seconds < TICK


def test_a_transfer_thread_that_hangs_is_a_stall() -> None:
    assert observed(*beating(6, transfer=9)) == Stall(2.5, "its transfer thread hangs", is_first=True)


def test_the_first_beat_after_a_stall_ends_it() -> None:
    readings = [*[LoopProgress(2, 0, 0, 0)] * 8, LoopProgress(3, 0, 0, 0)]
    assert observed(*readings).seconds == 0


def test_a_stopped_rank_is_blamed_not_those_that_wait() -> None:
    waiting, frozen = Stall(4.6, "its step does not end"), Stall(4.4, "its process does not run", is_first=True)
    assert blamed([waiting, frozen, waiting], 2.0) == 1
    # Any of them may hang, or none: hosts may not reach each other.
    just_missed = Stall(0.2, "its process does not run", is_first=True)
    assert blamed([just_missed, waiting, waiting], 2.0) is None


def test_what_one_process_writes_another_reads() -> None:
    pulse, descriptor = Pulse.create()
    other = Pulse(descriptor)
    assert other.read() == LoopProgress(0, 0, 0, 0)
    pulse.write(LoopProgress(1, 2, 3, 2**40))
    assert other.read() == LoopProgress(1, 2, 3, 2**40)
