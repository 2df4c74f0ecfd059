import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT

SETTLED = "from mesh.processes.standard_streams import complain, settle; settle(); import os, sys; "


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run `command`, in which PROGRAM's first argument is Python code that runs with settled streams."""
    variables = {"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "SETTLED": SETTLED, **environment}
    return subprocess.run(["sh", "-c", command], env=variables, capture_output=True, check=False)


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "<&-", ">&-", "2>&-"])
def test_a_closed_stream_is_the_null_device(closed: str, tmp_path: Path) -> None:
    opened = tmp_path / "opened"
    program = (
        f"file = open('{opened}', 'w'); print(1); sys.stderr.write('x'); sys.stdin.read(0); assert file.fileno() > 2"
    )
    assert shell(f'"$PYTHON" -c "$SETTLED {program}" {closed}').returncode == 0
    assert opened.read_text() == ""


def test_a_character_that_an_encoding_lacks_is_spelled() -> None:
    done = shell("\"$PYTHON\" -c \"$SETTLED print('│'); complain('│')\"", PYTHONIOENCODING="ascii")
    assert (done.stdout, done.stderr) == (b"\\u2502\n", b"\\u2502\n")


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_a_complaint_that_cannot_be_written_changes_no_status(stderr: str) -> None:
    assert shell(f'"$PYTHON" -c "$SETTLED complain(\'no\'); sys.exit(2)" {stderr}').returncode == 2
