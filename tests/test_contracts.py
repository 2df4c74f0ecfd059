"""The committed stubs are what the .proto files say, and clients can use them alone."""

import filecmp
import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).parent.parent / "protos"


def test_the_committed_stubs_are_those_of_the_proto_files(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("deepmesh/v1/*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *protos], cwd=PROTOS, check=True)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert len(generated) == 3 * len(protos)
    stale = [str(path) for path in generated if not filecmp.cmp(tmp_path / path, PROTOS / path, shallow=False)]
    assert not stale, "run `make protos`"


def test_buf_finds_nothing_to_lint() -> None:
    buf = Path(sys.executable).parent / "buf"
    done = subprocess.run([buf, "lint"], cwd=PROTOS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
