from bench.memory.__main__ import LoadingRow
from bench.memory.loading_peak import LoadingPeak
from bench.memory.serving_memory import MemoryCurve


def test_growth_counts_from_the_end_of_the_warmup() -> None:
    curve = MemoryCurve()
    for requests, size in ((0, 10), (100, 50), (200, 53)):
        curve.note(requests, {"gateway": size})
    assert curve.growth_bytes("gateway", warmup=100) == 3


def test_a_peak_is_compared_with_what_must_be_in_memory() -> None:
    as_stored = LoadingRow("bfloat16", 1000, LoadingPeak(baseline_bytes=300, peak_bytes=1400, parameter_bytes=990))
    widened = LoadingRow("float32", 1000, LoadingPeak(baseline_bytes=300, peak_bytes=2500, parameter_bytes=2000))
    assert (as_stored.ratio, widened.ratio) == (1.1, 1.1)
