"""The arrows of docs/architecture.md, enforced."""

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROTOS = "deepmesh"
MAY_IMPORT = {
    "mesh": {"mesh", PROTOS},
    "gateway": {"gateway", "mesh", PROTOS},
    "scheduler": {"scheduler", "mesh", PROTOS},
    "decode_svc": {"decode_svc", "engine", "transfer", "kvstore", "mesh", PROTOS},
    "engine": {"engine", "kernels", "transfer", "mesh", PROTOS},
    "transfer": {"transfer", "mesh", PROTOS},
    "prefill_svc": {"prefill_svc", "engine", "transfer", "kvstore", "mesh", PROTOS},
    "kvstore": {"kvstore", "transfer", "mesh", PROTOS},
    "kernels": {"kernels"},
    "tools": {"tools", "engine", "kernels", "mesh", "eval"},
    "bench": {"bench", "tools", "engine", "kernels", "transfer", "kvstore", "mesh", "eval", PROTOS},
    "eval": {"eval", "mesh", PROTOS},
}
# The `deepmesh` command composes what others make; only inside its functions, so that a command loads only its own.
COMMAND_MODULES = "mesh/commands"
COMMAND_MAY_IMPORT = {"bench", "tools", "eval"}
TORCH_HOMES = (
    "kernels/",
    "tools/",
    "bench/",
    "engine/model/",
    "engine/runner.py",
    "engine/sampler.py",
    "engine/checkpoint",
    "engine/device_memory.py",
    "engine/loading.py",
    "engine/random_weights.py",
    "engine/memory_plan.py",
    "engine/profiling.py",
    "engine/progress.py",
    "engine/graphs.py",
)
# Inside functions only: a rank on the oracle backend starts without it.
LAZY_TORCH_HOMES = ("engine/rank.py",)
SERVICES = ("gateway", "scheduler", "prefill_svc", "decode_svc", "kvstore")
# What services share of their domain.
SHARED = ("engine", "transfer")
# Of these, what speaks gRPC; the rest is domain.
EDGES = ("__main__.py", "service.py", "wire.py", "_link.py")


def our_packages() -> set[str]:
    return {name for name in MAY_IMPORT if (ROOT / name).is_dir()}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in sorted(our_packages()):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Each imported module, and whether the import stands at the top of the file."""
    top = {id(node) for node in getattr(tree, "body", [])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, id(node) in top


def test_every_import_follows_an_arrow() -> None:
    ours = set(MAY_IMPORT) | {PROTOS}
    wrong = []
    for path, tree in sources():
        for module, at_top in imported_modules(tree):
            target = module.partition(".")[0]
            allowed = MAY_IMPORT[path.parts[0]]
            if str(path).startswith(COMMAND_MODULES) and not at_top:
                allowed = allowed | COMMAND_MAY_IMPORT
            if target in ours and target not in allowed:
                wrong.append(f"{path} imports {module}")
    assert not wrong


def test_torch_is_imported_only_where_tensors_live() -> None:
    wrong = [
        f"{path} imports {module}"
        for path, tree in sources()
        for module, at_top in imported_modules(tree)
        if module.partition(".")[0] == "torch"
        and not str(path).startswith(TORCH_HOMES)
        and (at_top or not str(path).startswith(LAZY_TORCH_HOMES))
    ]
    assert not wrong


def test_the_domain_of_services_knows_no_grpc() -> None:
    wrong = [
        f"{path} imports {module}"
        for path, tree in sources()
        for module, _ in imported_modules(tree)
        if path.parts[0] in (*SERVICES, *SHARED)
        and module.partition(".")[0] in ("grpc", PROTOS)
        and not path.name.endswith(EDGES)
    ]
    assert not wrong


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_process_starts_with_neither_torch_nor_ucx(service: str) -> None:
    program = f"import sys\nsys.modules['torch'] = sys.modules['ucxx'] = None\nimport {service}.__main__\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_other_distribution_owns_one_of_our_top_level_names() -> None:
    ours = our_packages() | {PROTOS}
    owners: dict[str, set[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name is None or name.startswith("deepmesh"):
            continue
        for file in distribution.files or []:
            top = file.parts[0]
            if top in ours or top.removesuffix(".py") in ours:
                owners.setdefault(top, set()).add(name)
    assert not owners


def test_every_package_is_declared() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in our_packages()
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert declared == present
