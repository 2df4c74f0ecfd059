"""The bench of the quantizer and the loader, on a CPU with small layers."""

import gc
import mmap
from collections.abc import Iterator

import pytest
import torch

from bench.quantize import source, stages
from bench.quantize.host_memory import host_peak
from bench.quantize.loading import load, shard_files
from bench.quantize.quantizing import unit_bytes
from bench.quantize.stages import Options
from engine.weights.loading import load_model
from engine.weights.shards import open_shards

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Options]:
    made = Options("small", 2, 1, tmp_path_factory.mktemp("bench"), "cpu", sequences=4, tokens=64)
    with pytest.MonkeyPatch.context() as patched:
        # Several, as a large checkpoint has.
        patched.setattr(source, "LARGEST_SHARD_BYTES", 8_000_000)
        stages.make_source(made)
    yield made


def test_the_source_is_what_the_engine_serves(options: Options) -> None:
    files = shard_files(options.source)
    assert len(files) >= 3 and max(path.stat().st_size for path in files) < 9e6
    model = load_model(options.source, torch.float32, CPU)
    for parameter in model.parameters():
        assert parameter.place.isfinite().all() and parameter.place.any(), parameter.name
        if parameter.name.endswith("_proj.weight"):
            assert float(parameter.place.std()) == pytest.approx(parameter.shape[1] ** -0.5, rel=0.1), parameter.name


def test_layers_of_a_result_are_reported_as_they_come(options: Options, capfd: pytest.CaptureFixture[str]) -> None:
    layers = stages.quantize_plainly(options)
    assert [layer.report.name for layer in layers] == ["rest", "0", "1"]
    assert [layer.source_bytes for layer in layers] == [unit_bytes(options.source)[name] for name in ("rest", "0", "1")]
    assert layers[2].report.int4_error == pytest.approx(0.118, abs=0.01)
    # A layer of the result, some matrices, and what torch takes for itself.
    assert layers[2].host_peak_bytes < 2 * layers[2].source_bytes
    printed = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["fingerprint of the source", "w4a8 rest", "w4a8 0", "w4a8 1"]


def test_awq_is_compared_with_rounding_on_the_same_texts(options: Options) -> None:
    *_, scaled = stages.quantize_with_static_scales(options)
    *_, searched = stages.quantize_with_awq(options)
    assert scaled.report.output_error is not None and searched.report.output_error is not None
    assert searched.report.output_error < 0.9 * scaled.report.output_error
    assert stages.load_from_disk(options) > 0


def test_a_load_takes_little_beside_the_parameters(options: Options) -> None:
    found = load(options.source, CPU)
    assert found.host_peak_bytes < 0.5 * sum(unit_bytes(options.source).values())
    with open_shards(options.source) as shards:
        assert found.rate * found.seconds == pytest.approx(shards.size_bytes, rel=0.01)


def test_the_highest_memory_is_found_though_it_was_given_back() -> None:
    # What earlier tests have left would be given back meanwhile.
    gc.collect()
    # Memory that no allocator has kept.
    pages = mmap.mmap(-1, 200_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with host_peak() as peak:
        pages.write(bytes(200_000_000))
        peak.look()
        pages.close()
    # The kernel counts what each thread takes and gives back in lots, and other threads of the process may give back
    # some tens of megabytes.
    assert 130e6 <= peak.peak_bytes < 500e6
