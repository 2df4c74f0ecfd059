"""What an installation brings, with and without constraints.txt."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from setuptools import find_packages

ROOT = Path(__file__).parent.parent
PIN = re.compile(r"^([\w.-]+)==([^;\s]+)")


def test_an_installation_without_constraints_brings_the_ucx_that_was_measured() -> None:
    constraints = pins((ROOT / "constraints.txt").read_text().splitlines())
    dependencies = pins(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    for package in ("libucx-cu13", "ucxx-cu13"):
        assert dependencies[package] == constraints[package]


def test_every_suite_of_others_is_pinned() -> None:
    constraints = pins((ROOT / "tests/conformance/constraints.txt").read_text().splitlines())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {requirement.partition(">=")[0] for requirement in extras["conformance"]} <= set(constraints)


def pins(requirements: list[str]) -> dict[str, str]:
    matches = [PIN.match(requirement) for requirement in requirements]
    return {match[1]: match[2] for match in matches if match}


def test_an_image_is_built_with_every_package() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {package.partition(".")[0] for package in packages()} <= sent


def test_every_file_that_a_package_reads_is_shipped_with_it() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    shipped = {path for package in packages() for pattern in patterns for path in folder(package).glob(pattern)}
    read = {
        path
        for package in packages()
        for path in folder(package).rglob("*")
        if path.suffix in (".cu", ".cuh", ".h", ".typed", ".json", ".yaml", ".html") and path.is_file()
    }
    assert read <= shipped


def test_packages_chart_and_changelog_name_the_same_version() -> None:
    projects = [ROOT / "pyproject.toml", ROOT / "protos/pyproject.toml", ROOT / "models/pyproject.toml"]
    versions = {tomllib.loads(path.read_text())["project"]["version"] for path in projects}
    chart = yaml.safe_load((ROOT / "deploy/helm/deepmesh/Chart.yaml").read_text())
    (newest, *_) = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions == {chart["version"]} == {chart["appVersion"]} == {newest}


@pytest.mark.check("release")
def test_the_release_has_a_date_and_no_tag_yet() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (newest, *_) = re.findall(r"^## .*", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", newest), "write its date into CHANGELOG.md"
    tags = subprocess.run(["git", "tag", "--list", f"v{version}"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not tags.stdout, f"{version} was released: raise the version"


def packages() -> list[str]:
    """All that an installation has."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    return list(find_packages(str(ROOT), exclude=options["exclude"]))


def folder(package: str) -> Path:
    return ROOT.joinpath(*package.split("."))


@pytest.mark.check("dist")
def test_the_three_wheels_serve_in_an_empty_environment(tmp_path: Path) -> None:
    environment, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    wheels = list((ROOT / "dist").glob("*.whl"))
    assert len(wheels) == 3, "run `make dist`"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *wheels], check=True)
    # What they need is taken from this environment, as plain files: an editable installation is not followed.
    paths = next(environment.glob("lib/python*/site-packages")) / "needs.pth"
    paths.write_text(f"{Path(pytest.__file__).parents[1]}\n")
    command = [str(environment / "bin/deepmesh"), "demo", "--prefill", "0", "--kvstore", "0"]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(ROOT) not in (elsewhere / "out/demo.log").read_text()
