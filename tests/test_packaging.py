"""What an installation brings, with and without constraints.txt."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PIN = re.compile(r"^([\w.-]+)==([^;\s]+)")


def test_an_installation_without_constraints_brings_the_ucx_that_was_measured() -> None:
    constraints = pins((ROOT / "constraints.txt").read_text().splitlines())
    dependencies = pins(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    for package in ("libucx-cu13", "ucxx-cu13"):
        assert dependencies[package] == constraints[package]


def pins(requirements: list[str]) -> dict[str, str]:
    matches = [PIN.match(requirement) for requirement in requirements]
    return {match[1]: match[2] for match in matches if match}
