"""The documentation that every Python installation carries: the docstrings of its standard library."""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from inspect import cleandoc
from pathlib import Path

SKIPPED = frozenset(
    {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "ensurepip", "__pycache__"}
)
SHORTEST_CHARACTERS = 40
LONGEST_CHARACTERS = 6000
HELD_OUT_ONE_IN = 32
Documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class LibraryEntry:
    """One module, class or function."""

    # Dotted, such as "json.dumps".
    name: str
    # How it is called, such as "json.dumps(obj, indent)"; the name itself for modules and classes.
    signature: str
    text: str

    @property
    def document(self) -> str:
        return f"{self.signature}\n\n{self.text}"

    @property
    def first_sentence(self) -> str:
        """The first paragraph up to its first full stop, on one line."""
        paragraph = " ".join(self.text.split("\n\n")[0].split())
        return paragraph.split(". ")[0].removesuffix(".") + "."

    @property
    def is_held_out(self) -> bool:
        digest = blake2b(self.name.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def library_entries() -> list[LibraryEntry]:
    """Every documented entry of the standard library's Python sources, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    entries: list[LibraryEntry] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED.isdisjoint(parts):
            module = ".".join(part for part in parts if part != "__init__")
            entries += _entries(module, path)
    return entries


def _entries(module: str, path: Path) -> Iterator[LibraryEntry]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        # Some installations contain sources for other Python versions.
        return
    yield from _documented(tree, module)


def _documented(node: ast.AST, name: str) -> Iterator[LibraryEntry]:
    if isinstance(node, (ast.Module, *Documented)):
        text = cleandoc(ast.get_docstring(node) or "")
        if len(text) >= SHORTEST_CHARACTERS:
            yield LibraryEntry(name, _signature(node, name), text[:LONGEST_CHARACTERS])
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Documented) and not child.name.startswith("_"):
            yield from _documented(child, f"{name}.{child.name}")


def _signature(node: ast.AST, name: str) -> str:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return name
    arguments = (argument.arg for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
    return f"{name}({', '.join(argument for argument in arguments if argument != 'self')})"
