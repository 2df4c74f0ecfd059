"""What `make site` does not see: links of pages outside the site, names of files and commands."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mesh.domain.architectures import FAMILY
from tools.words import places, readable_files

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "tests/support/README.md"]
PACKAGES = [*(path.parent for path in ROOT.glob("*/__init__.py")), ROOT / "tests"]
NOTES = sorted(path for package in PACKAGES for path in package.rglob("notes.md"))
DOCUMENTS = [*PAGES, *(str(path.relative_to(ROOT)) for path in (*sorted(ROOT.glob("docs/**/*.md")), *NOTES))]


def prose(path: Path) -> str:
    """A document without what stands in blocks of code."""
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(path: Path) -> Iterator[str]:
    """Anchors of the page's headings, as GitHub and the site name them."""
    for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lower())
        yield re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def links(path: Path) -> list[str]:
    """To files of the repository."""
    return [each for each in re.findall(r"\]\(([^)\s]+)\)", prose(path)) if not re.match(r"\w+:", each)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_to_a_file_and_heading(document: str) -> None:
    path = ROOT / document
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each != "CHANGELOG.md"])
def test_every_file_and_command_that_is_named_exists(document: str) -> None:
    """Paths begin at the root, in tests/ or at the page; a word in capitals, such as NAME, stands for any."""
    text = (ROOT / document).read_text(encoding="utf-8")
    files = re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|cuh?|proto|ya?ml))(?:::\w+)?`", text)
    commands = re.findall(r"\bpython -m ((?:\w+\.)*\w+)", text)
    modules = [each.replace(".", "/") for each in commands if (ROOT / each.partition(".")[0]).is_dir()]
    named = {each for each in files + modules if not re.search(r"\b(test_)?(NAME|SERVICE)\b", each)}
    found = {
        each for each in named for root in (ROOT, ROOT / "tests", (ROOT / document).parent) if (root / each).exists()
    }
    found |= {each for each in named if (ROOT / f"{each}.py").exists()}
    assert not named - found


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


def test_contributing_leads_to_all_notes() -> None:
    assert {*NOTES} <= {ROOT / link for link in links(ROOT / "CONTRIBUTING.md")}


def test_the_page_of_models_names_every_architecture() -> None:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert not [each.name for each in FAMILY if f"`{each.name}`" not in page]


def test_no_text_has_the_words_that_say_little() -> None:
    """`python -m tools.words` lists them, with names of tests above ten words; CONTRIBUTING.md says what to write."""
    assert not [*places(readable_files())]
