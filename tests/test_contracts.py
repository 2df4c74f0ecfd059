"""The committed stubs and pages are what they are made from, and the contracts change only in compatible ways."""

import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from capacity.choices_page import choices_page
from cli.settings.page import configuration_page
from cli.settings.services import MODELS
from deploy.helm import schema
from mesh.config_keys import keys_of
from tools.metrics_page import metrics_page
from tools.modules_page import modules_page

DOCS = Path(__file__).parent.parent / "docs"
PROTOS = Path(__file__).parent.parent / "protos"
BUF = Path(sys.executable).parent / "buf"
PUBLIC = "deepmesh/v1/common.proto"
INTERNAL = "deepmesh/internal/v1/decode.proto"


def test_the_committed_stubs_are_those_of_the_proto_files(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("deepmesh/**/*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *protos], cwd=PROTOS, check=True)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    committed = sorted(
        path.relative_to(PROTOS) for path in PROTOS.glob("deepmesh/**/*_pb2*.py*") if path.suffix != ".pyc"
    )
    assert generated == committed, "run `make protos`"
    stale = [str(path) for path in generated if not filecmp.cmp(tmp_path / path, PROTOS / path, shallow=False)]
    assert not stale, "run `make protos`"


def test_the_configurations_page_is_that_of_the_models() -> None:
    assert (DOCS / "configuration.md").read_text() == configuration_page(), "run `make docs`"


def test_the_chart_takes_the_keys_of_the_configuration() -> None:
    assert schema.SCHEMA.read_text() == schema.text(), "run `make chart-schema`"


def test_the_metrics_page_is_that_of_their_definitions() -> None:
    assert (DOCS / "metrics.md").read_text() == metrics_page(), "run `make docs`"


def test_the_page_of_choices_is_what_the_rules_make() -> None:
    assert (DOCS / "choices.md").read_text(encoding="utf-8") == choices_page(), "run `make docs`"


def test_the_modules_page_is_that_of_their_docstrings() -> None:
    assert (DOCS / "modules.md").read_text(encoding="utf-8") == modules_page(), "run `make docs`"


@pytest.mark.parametrize("service", MODELS)
def test_every_key_of_the_configuration_has_a_meaning(service: str) -> None:
    """As a docstring below the field; a section has it from its model."""
    assert [key.path for key in keys_of(MODELS[service]) if not key.meaning] == []


def test_buf_finds_nothing_to_lint() -> None:
    done = subprocess.run([BUF, "lint"], cwd=PROTOS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "before", "after", "compatible"),
    [
        (PUBLIC, "uint32 prompt_tokens = 1", "uint32 prompt_length = 1", False),
        (PUBLIC, "uint32 prompt_tokens = 1", "uint32 prompt_tokens = 9", False),
        (INTERNAL, "string request_id = 2", "string request_name = 2", True),
        (INTERNAL, "string request_id = 2", "uint64 request_id = 2", False),
    ],
)
def test_buf_refuses_what_breaks_clients_or_a_rolling_upgrade(
    tmp_path: Path, file: str, before: str, after: str, compatible: bool
) -> None:
    changed = shutil.copytree(PROTOS, tmp_path / "protos")
    text = (changed / file).read_text()
    assert before in text
    (changed / file).write_text(text.replace(before, after))
    done = subprocess.run([BUF, "breaking", "--against", PROTOS], cwd=changed, capture_output=True, text=True)
    assert (done.returncode == 0) == compatible, done.stdout + done.stderr
