"""A hook of mkdocs: adds the notes in the folders of the code to the site, since its pages refer to them."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

NOTES = "notes.md"
# A link from a page to notes, and a link from notes to a page.
TO_NOTES = re.compile(r"\]\(\.\./([\w/]+)/notes\.md(?=[#)])")
TO_PAGE = re.compile(r"\]\((?:\.\./)+docs/")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each folder's notes as notes/FOLDER.md."""
    root = Path(config.config_file_path).parent
    for package in sorted({path.parent for path in root.glob("*/__init__.py")}):
        for path in sorted(package.rglob(NOTES)):
            place = f"notes/{path.parent.relative_to(root)}.md"
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links between pages and notes to the places of both in the site."""
    up = "../" * page.file.src_uri.count("/")
    return TO_PAGE.sub(f"]({up}", TO_NOTES.sub(rf"]({up}notes/\1.md", markdown))
