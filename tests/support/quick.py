"""Which test modules `make quick` runs: those that import no torch and start no process. Read from the sources."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
# Importing one of these takes seconds.
SLOW_IMPORTS = {"torch", "triton", "transformers"}
# How tests start processes, wherever in a file it stands.
_STARTS = re.compile(
    r"\b(subprocess|create_subprocess_\w+|multiprocessing|os\.fork|launcher\.process|ranks\.process|mesh\.tethered)\b"
)
# These start one only if asked to: Envoy runs where DEEPMESH_BEHIND_ENVOY is set.
_MAY_START = {TESTS / "support/envoy.py", Path(__file__)}
_IMPORT = re.compile(r"^([ \t]*)(?:from ([\w.]+) import (\([^)]*\)|.*)|import ([\w., ]+))", re.MULTILINE)


def is_quick(test: Path) -> bool:
    """Whether neither the module nor what it imports, directly or not, imports torch, and no test code among it starts
    a process.

    Of the product only imports at the top of a file count: what is inside of functions may never be imported.
    """
    seen = {test}
    waiting = [test]
    while waiting:
        path = waiting.pop()
        if path.is_relative_to(TESTS) and path not in _MAY_START and _STARTS.search(_text(path)):
            return False
        for module in _imported(path):
            if module.partition(".")[0] in SLOW_IMPORTS:
                return False
            found = set(_files(module)) - seen
            seen |= found
            waiting += found
    return True


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _imported(path: Path) -> frozenset[str]:
    """Names of modules, and of what is imported from them, which may be modules too."""
    everywhere = path.is_relative_to(TESTS)
    modules = set[str]()
    for indented, source, names, plain in _IMPORT.findall(_text(path)):
        if not indented or everywhere:
            modules |= {source, *(f"{source}.{name}" for name in re.findall(r"\w+", names))} if source else set()
            modules |= {name.split(" as ")[0].strip() for name in plain.split(",")}
    return frozenset(modules - {""})


@cache
def _files(module: str) -> tuple[Path, ...]:
    """Files of ours that importing the module executes: its packages' and its own."""
    parts = module.split(".")
    places = [ROOT.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
    files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
    return tuple(file for file in files if file.is_file())
