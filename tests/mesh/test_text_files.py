import subprocess
import sys
from pathlib import Path

import pytest

from mesh.text_files import read_text
from tests.support.programs import ROOT

TEXT = "Straße 你好 \N{GRINNING FACE}"


@pytest.mark.parametrize("mark", ["", "\N{ZERO WIDTH NO-BREAK SPACE}"], ids=["plain", "byte order mark"])
def test_text_is_utf8_whatever_the_locale(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes((mark + TEXT).encode())
    program = (
        "import pathlib, sys; from mesh.text_files import read_text; print(ascii(read_text(pathlib.Path(sys.argv[1]))))"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], env=environment, capture_output=True, check=True, encoding="ascii"
    )
    assert done.stdout.strip() == ascii(TEXT)


@pytest.mark.parametrize("encoding", ["iso-8859-1", "utf-16"])
def test_other_encodings_are_refused_in_a_sentence(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("Straße".encode(encoding))
    with pytest.raises(OSError) as refused:
        read_text(tmp_path / "text")
    assert str(refused.value.strerror).startswith("it is no text in UTF-8 (byte ")
