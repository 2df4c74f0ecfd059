"""What the two meshes of the comparison are started with."""

from pathlib import Path

from bench.node.disaggregation import MESHES, Options, settings_of, write_model
from cli.launcher.composition import compose
from cli.launcher.plan import MeshPlan
from cli.settings.check import check_settings


def test_both_meshes_take_two_gpus_and_settings_that_services_know(tmp_path: Path) -> None:
    options = Options((1.0,), 1.0, 100, 10, 9, None, 32)
    directory = write_model(tmp_path, options.layers)
    for name in MESHES:
        settings = tuple(settings_of(name, options))
        plan = MeshPlan(directory, settings=settings, prefill_workers=int(name == "pd"), gpus=("0", "1"))
        specs = compose(plan)
        check_settings(specs)
        used = [gpu for spec in specs if spec.gpu is not None for gpu in spec.gpu.own]
        assert sorted(used) == ["0", "1"]


def test_the_bound_of_a_token_is_in_proportion_to_the_layers() -> None:
    assert Options((), 0.0, 0, 0, 61, None, 1).tpot_ms == 50.0
    assert Options((), 0.0, 0, 0, 6, None, 1).tpot_ms < 5.0
