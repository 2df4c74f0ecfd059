"""The options of commands: their help, what is refused, and what documents say of them."""

import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.commands import build
from mesh.errors import ConfigError
from tests.support.programs import ROOT


@pytest.mark.parametrize("command", ["health", "quantize", "make-checkpoint", "config", "up", "bench"])
def test_help_names_no_python_type(command: str) -> None:
    assert re.findall(r"<(?:str|int|float|path|bool)\b", CliRunner().invoke(build(), [command, "--help"]).output) == []


def test_a_wrong_choice_is_told_without_its_type() -> None:
    said = CliRunner().invoke(build(), ["role", "prefill-0", "gateway"], env={"COLUMNS": "200"})
    assert (said.exit_code, "Invalid value for 'ROLE': 'gateway' is not one of" in said.output) == (2, True)


@pytest.mark.parametrize("command", ["chat", "bench", "eval", "calibrate"])
def test_every_command_takes_the_key_from_the_same_variable(command: str) -> None:
    out = CliRunner().invoke(build(), [command, "--help"], env={"COLUMNS": "200"}).output
    assert re.findall(r"env var: (\w+API_KEY)", out) == ["DEEPMESH_API_KEY"]


@pytest.mark.parametrize("command", [["chat"], ["bench", "--rate", "1"], ["calibrate"]])
@pytest.mark.parametrize("address", ["localhost", "http://127.0.0.1:8001"])
def test_an_endpoint_is_a_host_and_a_port(command: list[str], address: str) -> None:
    found = CliRunner().invoke(build(), [*command, "--endpoint", address], env={"COLUMNS": "200"})
    assert (found.exit_code, f"expected host:port, not '{address}'" in found.output) == (2, True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--dataset", "nowhere.jsonl"), "cannot read the dataset nowhere.jsonl"),
        (("--url", "127.0.0.1:8000"), "url: expected text such as http://127.0.0.1:8000/v1"),
    ],
)
def test_bench_refuses_a_wrong_option_before_it_asks_an_endpoint(
    options: tuple[str, str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        build()(["bench", *options, "--output", str(tmp_path / "report.json")], standalone_mode=False)


def test_documents_name_only_options_that_there_are() -> None:
    group = typer.main.get_command(build())
    assert isinstance(group, typer.core.TyperGroup)
    options = {name: {each for one in command.params for each in one.opts} for name, command in group.commands.items()}
    for document in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")):
        for name, rest in re.findall(r"\bdeepmesh ([a-z-]+)([^`\n|#\"]*)", document.read_text(encoding="utf-8")):
            given = re.findall(r"(?<!\S)--[a-z-]+", rest)
            unknown = set(given) - options.get(name, set(given))
            assert not unknown, f"{document}: deepmesh {name} has no {unknown}"
