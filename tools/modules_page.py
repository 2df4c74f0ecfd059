"""`python -m tools.modules_page`: makes docs/modules.md from the first sentence of each module's docstring."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# In the order of a request; then what starts, loads, plans and simulates a mesh. Benchmarks have a page of their own
# (bench/README.md), and commands of tools/ say themselves what they do.
ROOMS = (
    "gateway",
    "scheduler",
    "worker",
    "prefill_svc",
    "decode_svc",
    "engine",
    "transfer",
    "kvstore",
    "mesh",
    "launcher",
    "cli",
    "loadgen",
    "capacity",
    "eval",
    "sim",
)
# What each of these is follows from its name: see docs/architecture.md.
USUAL = ("__main__", "config", "service", "wire")
_HEAD = """<!-- Written by `make docs` from the modules' docstrings. -->

# Modules

Every module of the product, with the first sentence of its docstring. [Architecture](architecture.md) says how they
work together. `__main__`, `config`, `service` and `wire` mean the same everywhere: they compose a process, configure
it, translate calls and translate messages.
"""


def modules_page() -> str:
    """The page as Markdown."""
    folders = (folder for room in ROOMS for folder in _folders(ROOT / room))
    return _HEAD + "".join(map(_section, folders)) + _kernels()


def _folders(folder: Path) -> Iterator[Path]:
    """The folder and the packages in it, at any depth."""
    yield folder
    for inner in _packages(folder):
        yield from _folders(inner)


def _packages(folder: Path) -> list[Path]:
    return [path.parent for path in sorted(folder.glob("*/__init__.py"))]


def _modules(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]


def _section(folder: Path) -> str:
    place = folder.relative_to(ROOT)
    modules = _modules(folder)
    usual = ", ".join(f"`{path.stem}`" for path in modules if path.stem in USUAL)
    rows = "".join(f"| `{path.stem}` | {_sentence(path)} |\n" for path in modules if path.stem not in USUAL)
    return (
        f"\n{'#' * min(len(place.parts) + 1, 4)} {place}/\n\n{_sentence(folder / '__init__.py')}"
        + (f" Usual modules: {usual}." if usual else "")
        + (f"\n\n| module | what it is |\n|---|---|\n{rows}" if rows else "\n")
    )


def _kernels() -> str:
    """One line for each operation: its modules are the ways to compute it."""
    folder = ROOT / "kernels"
    ways = {path: ", ".join(f"`{each.stem}`" for each in _modules(path)) for path in _packages(folder)}
    operations = "".join(f"| `{path.name}` | {_sentence(path / '__init__.py')} | {ways[path]} |\n" for path in ways)
    table = f"\n| operation | what it computes | modules |\n|---|---|---|\n{operations}"
    return _section(folder).rstrip() + "\n" + table


def _sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph, maxsplit=1)[0].replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(modules_page())
