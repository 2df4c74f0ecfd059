"""`python -m tools.modules_page`: makes docs/modules.md from the first sentence of each module's docstring."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# In the order of a request; then what starts, measures and simulates a mesh.
ROOMS = (
    "gateway",
    "scheduler",
    "worker",
    "prefill_svc",
    "decode_svc",
    "engine",
    "kernels",
    "transfer",
    "kvstore",
    "mesh",
    "cli",
    "launcher",
    "tools",
    "eval",
    "loadgen",
    "capacity",
    "sim",
    "models",
    "bench",
)
_HEAD = """<!-- Written by `make docs` from the modules' docstrings. -->

# Modules

Every folder and every module, with the first sentence of its docstring. [Architecture](architecture.md) says how they
work together.
"""


def modules_page() -> str:
    """The page as Markdown."""
    return _HEAD + "".join(_folder(folder, depth=0) for room in ROOMS for folder in [ROOT / room])


def _folder(folder: Path, depth: int) -> str:
    title = f"\n{'#' * min(depth + 2, 4)} {folder.relative_to(ROOT)}/\n\n{_sentence(folder / '__init__.py')}\n"
    modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    rows = "".join(f"| `{path.stem}` | {_sentence(path)} |\n" for path in modules)
    table = f"\n| module | what it is |\n|---|---|\n{rows}" if rows else ""
    return title + table + "".join(_folder(inner, depth + 1) for inner in _packages(folder))


def _packages(folder: Path) -> Iterator[Path]:
    yield from (path.parent for path in sorted(folder.glob("*/__init__.py")))


def _sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z])", paragraph, maxsplit=1)[0].replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(modules_page())
