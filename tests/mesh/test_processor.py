from pathlib import Path

from mesh.processor import ProcessorShare


def test_the_share_counts_only_time_the_thread_could_run(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("1000 500 3\n")
    processor = ProcessorShare(schedstat)
    schedstat.write_text("4000 1500 5\n")
    assert processor.measure() == 0.75
    # It did not run since.
    assert processor.measure() == 1.0


def test_a_system_that_does_not_tell_gives_all_of_it(tmp_path: Path) -> None:
    assert ProcessorShare(tmp_path / "nothing").measure() == 1.0


def test_this_process_gets_some_of_a_core() -> None:
    processor = ProcessorShare()
    sum(range(100_000))
    assert 0 < processor.measure() <= 1
