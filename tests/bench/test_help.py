"""Every benchmark can be imported and says what it takes. What they compute is tested where it is arithmetic."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Other benchmarks start these with arguments of their own.
STARTED_BY_OTHERS = {"bench.memory.loading_peak", "bench.mesh_overhead.engine_alone"}


def programs() -> list[str]:
    paths = (path for path in (ROOT / "bench").rglob("*.py") if '__name__ == "__main__"' in path.read_text())
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in paths)
    return sorted({*names} - STARTED_BY_OTHERS)


@pytest.mark.parametrize("program", programs())
def test_a_benchmark_tells_its_arguments(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    # runpy would warn that another test has imported it.
    for name in (program, f"{program}.__main__"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out.lower()
