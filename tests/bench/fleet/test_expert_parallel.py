"""Steps of more and more GPUs: `python -m bench.fleet.expert_parallel` prints them."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.fleet.expert_parallel import GPUS, excesses, main, predict
from capacity.links import Links
from mesh.cost_file import load_costs

SLOW = replace(Links(), network_seconds=210e-6)


def test_more_hosts_make_a_step_longer_though_experts_shorter() -> None:
    # As the first talk of Tencent and NVIDIA on DeepSeek measured it from 8 to 16 GPUs.
    one, two = (predict(gpus, 16, SLOW, wanted_only=False, excess=0.0) for gpus in (8, 16))
    assert two.experts < one.experts and two.all > 1.3 * one.all and two.rest == one.rest


def test_rows_where_they_are_wanted_make_more_hosts_pay() -> None:
    steps = [predict(gpus, 16, Links(), wanted_only=gpus > 8, excess=0.0).all for gpus in GPUS]
    assert steps == sorted(steps, reverse=True)


def test_uneven_experts_cost_many_rows_more_than_few() -> None:
    in_order, moved = excesses(16)
    assert moved < 0.05 < 1 < in_order
    few, many = (
        [predict(16, rows, Links(), wanted_only=True, excess=excess).all for excess in (in_order, moved)]
        for rows in (16, 128)
    )
    assert many[0] - many[1] > few[0] - few[1] > 0


def test_cost_files_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(costs=tmp_path)
    assert "| 32, 512 |" in capsys.readouterr().out
    read = {gpus: load_costs(tmp_path / f"ep{gpus}.json").costs for gpus in GPUS}
    assert read[8].decode_ms(16) > read[32].decode_ms(16)
