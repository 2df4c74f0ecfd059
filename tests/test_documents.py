"""What `make site` does not see: links of the README and of what stands beside the site, names of modules."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CHANGELOG.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md")))]

# Every service's folder has them, and none is explained again for each.
SHAPE = {"__init__", "__main__", "config", "service", "wire"}
# Rooms whose tables in docs/architecture.md name some modules alone: a command is a module, and so is a task.
IN_PART = {"cli", "eval"}


def prose(path: Path) -> str:
    """A document without what stands in blocks of code."""
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def anchors(path: Path) -> Iterator[str]:
    """Anchors of the page's headings, as GitHub and the site name them."""
    for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower())
        yield re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def links(path: Path) -> list[str]:
    """To files of the repository."""
    return [each for each in re.findall(r"\]\(([^)\s]+)\)", prose(path)) if not re.match(r"\w+:", each)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(document: str) -> None:
    path = ROOT / document
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_leads_to_every_page() -> None:
    """At once, or by a page that it leads to."""
    known, found = [ROOT / "README.md"], set[Path]()
    while known:
        page = known.pop()
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target not in found:
                found.add(target)
                known.append(target)
    pages = {path for path in (ROOT / "docs").glob("**/*.md") if path.name != "index.md"}
    assert not pages - found


def rooms() -> dict[str, list[list[str]]]:
    """By room, what each row of its table in the architecture names."""
    sections = re.findall(r"^## (\w+)/ : .*?$(.*?)(?=^## |\Z)", prose(ROOT / "docs/architecture.md"), re.M | re.S)
    rows = {room: re.findall(r"^\| (.*?) \|", section, re.M) for room, section in sections}
    return {room: [re.findall(r"`([\w/]+)`", row) for row in rows[room]] for room in rows if any(rows[room])}


def named(room: str, row: list[str]) -> Iterator[str]:
    """Paths inside the room. A name without a folder may be in that of the name before it."""
    folder = ""
    for name in row:
        inside = [path for path in (name, folder + name) if (ROOT / room / f"{path}.py").exists()]
        found = next(iter(inside), name)
        folder = found[: found.rfind("/") + 1]
        yield found


@pytest.mark.parametrize("room", rooms())
def test_the_architecture_names_every_module_and_none_that_is_gone(room: str) -> None:
    names = {name for row in rooms()[room] for name in named(room, row)}
    folder = ROOT / room
    assert not {name for name in names if not (folder / f"{name}.py").exists() and not (folder / name).is_dir()}
    modules = {path.stem for path in folder.glob("*.py")} - SHAPE
    assert room in IN_PART or not modules - names
