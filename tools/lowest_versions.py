"""`python -m tools.lowest_versions`: the oldest versions that pyproject.toml allows, as constraints for pip."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
# The Makefile's TORCH chooses torch, whose builds for CPUs and for CUDA have versions of their own.
CHOSEN_ELSEWHERE = {"torch"}


def lowest_versions(requirements: list[str]) -> Iterator[str]:
    """NAME==VERSION for each requirement that names an oldest version."""
    for requirement in map(Requirement, requirements):
        oldest = [each.version for each in requirement.specifier if each.operator == ">="]
        if oldest and requirement.name not in CHOSEN_ELSEWHERE:
            yield f"{requirement.name}=={oldest[0]}"


def main() -> None:
    requirements = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    sys.stdout.writelines(f"{pin}\n" for pin in lowest_versions(requirements))


if __name__ == "__main__":
    main()
