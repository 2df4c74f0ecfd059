"""The arrows of docs/architecture.md, enforced."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parent.parent
PROTOS = "deepmesh"
# By room: a folder, or a folder inside it that has rules of its own. A room may import itself and what is listed.
MAY_IMPORT = {
    "mesh": {PROTOS},
    "transfer": {"mesh", PROTOS},
    "kernels": set(),
    "engine": {"kernels", "transfer", "mesh"},
    "worker": {"engine", "transfer", "kvstore", "mesh", PROTOS},
    "gateway": {"mesh", PROTOS},
    "scheduler": {"mesh", PROTOS},
    "kvstore": {"transfer", "mesh", PROTOS},
    "prefill_svc": {"worker", "engine", "transfer", "mesh", PROTOS},
    "decode_svc": {"worker", "engine", "transfer", "mesh", PROTOS},
    # It looks at a model before it starts anything.
    "launcher": {"engine", "mesh", PROTOS},
    # Keys of every service, checked and described before one starts.
    "cli/settings": {"launcher", "gateway", "scheduler", "prefill_svc", "decode_svc", "kvstore", "mesh"},
    "tools": {"engine", "kernels", "mesh", "eval"},
    "eval": {"launcher", "mesh", PROTOS},
    # Its tasks are a workload.
    "loadgen": {"eval", "mesh", PROTOS},
    "capacity": {"loadgen", "tools", "engine", "mesh", PROTOS},
    # It runs the services' own domain code in simulated time; nothing of the product may import it.
    "sim": {
        "scheduler",
        "gateway",
        "prefill_svc",
        "decode_svc",
        "kvstore",
        "worker",
        "engine",
        "transfer",
        "loadgen",
        "eval",
        "mesh",
    },
    # A command composes what others make.
    "cli": {"launcher", "cli/settings", "loadgen", "capacity", "tools", "eval", "sim", "engine", "mesh", PROTOS},
    # Leaves: nothing imports them, and no installation has them.
    # The gateway writes the prompts that the model is trained on.
    "models": {"gateway", "tools", "engine", "kernels", "mesh", "eval"},
    "bench": {
        "launcher",
        "loadgen",
        "capacity",
        "tools",
        "worker",
        "scheduler",
        "engine",
        "kernels",
        "transfer",
        "kvstore",
        "mesh",
        "eval",
        "sim",
        PROTOS,
    },
}
NOT_INSTALLED = {"bench", "models"}
# Torch is imported here, and in the lazy rooms inside functions only: a rank on the oracle backend does without it.
TORCH_ROOMS = (
    "kernels",
    "tools",
    "capacity",
    "models",
    "bench",
    "engine/drafts",
    "engine/exchange",
    "engine/memory",
    "engine/model",
    "engine/offload",
    "engine/runner",
    "engine/weights",
)
LAZY_TORCH_ROOMS = ("engine/rank",)
# Libraries that a service loads only if it needs them: each takes from 0.2 s to some seconds of a start.
HEAVY = ("torch", "ucxx", "redis", "hiredis")
SERVICES = ("gateway", "scheduler", "prefill_svc", "decode_svc", "kvstore")
# What services share of their domain.
SHARED = ("engine", "transfer", "worker")
# The files that speak gRPC; the rest is domain.
EDGES = ("__main__.py", "service.py", "wire.py", "_link.py")

# Calls that mean text, and the modes with which a call that opens a file does.
TEXT_CALLS = (".read_text", ".write_text")
OPENING_CALLS = ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile")
BINARY_MODES = {"rb", "wb", "ab", "xb", "r+b", "w+b", "rb+", "wb+"}
MODES = BINARY_MODES | {mode.replace("b", "") for mode in BINARY_MODES}

# One process reads the sources, which takes it some seconds.
pytestmark = pytest.mark.xdist_group("architecture")


def our_packages() -> set[str]:
    return {room for room in MAY_IMPORT if "/" not in room}


@cache
def sources() -> dict[Path, str]:
    paths = [path for package in sorted(our_packages()) for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


@cache
def imports() -> list[tuple[Path, str, bool]]:
    """Each file with each module that it imports, and whether the import stands at the top of the file."""
    return [(path, module, at_top) for path, tree in trees().items() for module, at_top in imported_modules(tree)]


def room_of(path: str) -> str | None:
    """The innermost room that a file or module lies in; None for what is not ours."""
    inside = [room for room in (*MAY_IMPORT, PROTOS) if f"{path}/".startswith(f"{room}/")]
    return max(inside, key=len, default=None)


def imported_modules(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, id(node) in top


def test_every_import_follows_an_arrow() -> None:
    wrong = []
    for path, module, _ in imports():
        here, there = room_of(str(path)), room_of(module.replace(".", "/"))
        assert here is not None
        if there is not None and there != here and there not in MAY_IMPORT[here]:
            wrong.append(f"{path} imports {module}")
    assert not wrong


def test_no_source_has_marks_of_a_merge() -> None:
    # In a string they are no error of syntax.
    marks = re.compile(r"^\s*(<{7}|>{7}) ", re.MULTILINE)
    assert not [path for path, text in sources().items() if marks.search(text)]


def test_a_command_loads_what_it_composes_only_when_it_runs() -> None:
    wrong = [
        f"{path} imports {module}"
        for path, module, at_top in imports()
        if at_top
        and room_of(str(path)) == "cli"
        and room_of(module.replace(".", "/")) in ("loadgen", "capacity", "tools", "eval", "sim")
    ]
    assert not wrong


def test_torch_is_imported_only_where_tensors_live() -> None:
    wrong = [
        f"{path} imports {module}"
        for path, module, at_top in imports()
        if module.partition(".")[0] == "torch"
        and not str(path).startswith(tuple(f"{room}/" for room in TORCH_ROOMS))
        and (at_top or not str(path).startswith(tuple(f"{room}/" for room in LAZY_TORCH_ROOMS)))
    ]
    assert not wrong


def test_the_domain_of_services_knows_no_grpc() -> None:
    wrong = [
        f"{path} imports {module}"
        for path, module, _ in imports()
        if path.parts[0] in (*SERVICES, *SHARED)
        and module.partition(".")[0] in ("grpc", PROTOS)
        and not path.name.endswith(EDGES)
    ]
    assert not wrong


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_process_starts_with_no_heavy_library(service: str) -> None:
    absent = "".join(f"sys.modules['{library}'] = " for library in HEAVY)
    program = f"import sys\n{absent}None\nimport {service}.__main__\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_other_distribution_owns_one_of_our_top_level_names() -> None:
    ours = our_packages() | {PROTOS}
    owners: dict[str, set[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name is None or name.startswith("deepmesh"):
            continue
        record = (distribution.read_text("RECORD") or "").splitlines()
        for top in {re.split("[/,]", line, maxsplit=1)[0] for line in record}:
            if top.removesuffix(".py") in ours:
                owners.setdefault(top, set()).add(name)
    assert not owners


def test_every_room_is_installed_but_the_leaves() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    installed = set(find_packages(str(ROOT), exclude=options["exclude"]))
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in our_packages() - NOT_INSTALLED
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert installed == present


def test_every_file_of_text_names_its_encoding() -> None:
    assert not [f"{path}: {call}" for path, tree in trees().items() for call in without_encoding(tree)]


def without_encoding(tree: ast.Module) -> Iterator[str]:
    """Calls that read or write text in the locale's encoding."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, options = called(call.func), {option.arg: option.value for option in call.keywords}
        modes = {arg.value for arg in call.args if isinstance(arg, ast.Constant)} & MODES
        opens_text = (name.endswith(OPENING_CALLS) and modes - BINARY_MODES) or (
            name == "open" and not modes & BINARY_MODES
        )
        if "encoding" not in options and (
            name.endswith(TEXT_CALLS) or opens_text or getattr(options.get("text"), "value", None) is True
        ):
            yield ast.unparse(call)


def called(function: ast.expr) -> str:
    """A function's name, or a method's with the point before it; empty for what has none."""
    match function:
        case ast.Name(name):
            return name
        case ast.Attribute(_, name):
            return f".{name}"
    return ""


@pytest.mark.parametrize(
    "call",
    [
        "path.read_text()",
        "open(path)",
        "path.open('w')",
        "os.fdopen(1, 'w')",
        "run(command, text=True)",
        "path.write_text(text)",
    ],
)
def test_a_call_without_an_encoding_is_found(call: str) -> None:
    assert list(without_encoding(ast.parse(call))) == [call]
