"""Writes docs/configuration.md: every key of every service, each section once."""

from collections.abc import Iterator, Sequence

from cli.settings.services import MODELS
from mesh.config_keys import Key, public_keys_of

_HEAD = """<!-- Written by `make docs` from the configuration models. -->

# Configuration

A service reads a YAML file (`python -m scheduler --config configs/scheduler.yaml`) and then its overrides
(`--set lease.seconds=5`). `deepmesh up --set SERVICE.KEY=VALUE` passes them on: `--set scheduler.lease.seconds=5`. An
unknown key fails the start, and under `deepmesh up` before anything starts. `deepmesh config SERVICE` prints the same
as this page for one service. `KEY[]` is one entry of a list. Some keys that only tests and simulations need are left
out.
"""


def configuration_page() -> str:
    """The page as Markdown."""
    return "\n".join([_HEAD, *(_section(title, meaning, keys) for title, meaning, keys in _sections())])


def _sections() -> Iterator[tuple[str, str, Sequence[Key]]]:
    """Title, meaning and keys of each section; sections shared by several services come first."""
    owners: dict[tuple[str, str, tuple[Key, ...]], list[str]] = {}
    for service, model in MODELS.items():
        keys = list(public_keys_of(model))
        tops = [key for key in keys if "." not in key.path]
        whole = ("", " ".join((model.__doc__ or "").split()), tuple(key for key in tops if key.section is None))
        below = [(top.path, top.meaning, tuple(_below(top, keys))) for top in tops if top.section is not None]
        for section in (whole, *below):
            owners.setdefault(section, []).append(service)
    for (path, meaning, own), services in sorted(owners.items(), key=lambda item: -len(item[1])):
        yield _title(path, services), meaning, own


def _below(section: Key, keys: Sequence[Key]) -> list[Key]:
    return [key for key in keys if key.path.startswith((f"{section.path}.", f"{section.path}[]."))]


def _title(path: str, services: Sequence[str]) -> str:
    who = "every service" if len(services) == len(MODELS) else " and ".join(services)
    return f"{path} ({who})" if path else who


def _section(title: str, meaning: str, keys: Sequence[Key]) -> str:
    rows = [f"| `{key.path}` | {_cell(key.kind)} | {_code(key.default)} | {_cell(key.meaning)} |" for key in keys]
    return "\n".join(
        [f"## {title}", "", meaning, "", "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _code(text: str) -> str:
    return f"`{text}`" if text not in ("", "required") else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
