"""What the two meshes of the comparison are started with."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.meshes.random_model import write_random_model
from bench.node.disaggregation import Measured, points_of, settled
from bench.node.goodput_plot import plot
from bench.node.served_meshes import EXPERTS, MESHES, SHAPE, Options, load_options, settings_of
from cli.settings.check import check_settings
from launcher.composition import compose
from launcher.plan import MeshPlan
from loadgen.client import Target
from loadgen.options import LoadOptions
from loadgen.plan import plan
from loadgen.records import RequestRecord
from loadgen.report import Report
from loadgen.summary import Objectives, summarize


@pytest.mark.parametrize("count", [2, 4])
def test_both_meshes_take_all_gpus_and_settings_that_services_know(tmp_path: Path, count: int) -> None:
    options = Options((1.0,), 1.0, 100, 10, 9, None, 32, count, next_n=1)
    names = [str(gpu) for gpu in range(count)]
    directory = write_random_model(tmp_path, SHAPE, options.layers, EXPERTS)
    for name in MESHES:
        settings = tuple(settings_of(name, options))
        plan = MeshPlan(directory, settings=settings, prefill_workers=int(name == "pd"), gpus=tuple(names))
        specs = compose(plan)
        check_settings(specs)
        used = [gpu for spec in specs if spec.gpu is not None for gpu in spec.gpu.own]
        assert sorted(used) == names


@pytest.mark.parametrize("same_prompts", [False, True])
def test_a_later_rate_may_repeat_an_earlier_ones_prompts(same_prompts: bool) -> None:
    options = Options((2.0, 4.0), 10.0, 100, 10, 9, None, 32, same_prompts=same_prompts)
    first, second = (
        {tuple(job.prompt) for job in plan(load_options("host:1", options, rate, number), Target("", 1000)).jobs}
        for number, rate in enumerate(options.rates)
    )
    assert first & second == (first if same_prompts else set())


def test_the_default_bound_of_a_token_follows_the_layers() -> None:
    assert Options((), 0.0, 0, 0, 61, None, 1).tpot_ms == 50.0
    assert Options((), 0.0, 0, 0, 6, None, 1, most_tpot_ms=20.0).tpot_ms == 20.0
    assert Options((), 0.0, 0, 0, 6, None, 1).tpot_ms < 5.0


def test_requests_that_meet_answers_of_another_rate_do_not_count() -> None:
    options = Options((2.0,), 10.0, 100, 10, 61, None, 1, settle_seconds=3.0)
    records = [RequestRecord(number, at, 10) for number, at in enumerate((12.0, 14.9, 15.0, 18.5, 19.0, 21.5))]
    done = LoadOptions(grpc="host:1", rate=2.0)
    report = Report("", "", done, summarize(records, Objectives(None, None)), records)
    assert settled(report, 12.0, options).requests == 2
    assert settled(report, 12.0, replace(options, settle_seconds=0.0)).requests == 6


def test_meshes_are_plotted_over_the_rates_at_which_tokens_came(tmp_path: Path) -> None:
    # Tokens come 10, 20 and 30 ms after one another.
    record = RequestRecord(0, 1.0, 10, message_times_s=[1.5, 1.51, 1.53, 1.56], message_tokens=[1] * 4, finished_s=1.56)
    late = replace(record, scheduled_s=-2.0)
    objectives = Objectives(ttft_ms=1000.0, tpot_ms=30.0)
    loads: list[tuple[str, float, list[RequestRecord]]] = [
        ("ifb", 2.0, [record]),
        ("pd", 4.0, [record, late]),
        ("pd", 8.0, []),
    ]
    measured = [Measured(mesh, rate, summarize(records, objectives)) for mesh, rate, records in loads]
    points = points_of(measured)
    assert [(point.mesh, point.rate, point.good) for point in points] == [("ifb", 2.0, 1.0), ("pd", 4.0, 0.5)]
    assert points[0].tpot_ms == pytest.approx(20.0)
    assert 1.4 < points[0].evenness < 1.5
    plot(points, 30.0, tmp_path / "meshes.png")
    assert (tmp_path / "meshes.png").stat().st_size > 1000
