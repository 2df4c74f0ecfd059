"""Words that say little here, and too long names of tests, counted by folder: `python -m tools.words [FOLDER ...]`.

Without a folder it prints a table of counts; with folders it prints their places. CONTRIBUTING.md says what to write
instead. A line may quote such a word: "behind".
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
# Where the words stand that people read. Generated files repeat others.
_READ = re.compile(r"(\.(py|cu|cuh|proto|md|ya?ml)|/Makefile|^Makefile)$")
_GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$|^docs/(configuration|metrics|modules)\.md$|^tools/words\.py$")
# Something that passes on what reaches it.
_FRONT = r"(it|them|each|(an? |the )?(\w+ )?(Envoy|prox(y|ies)|load balancer|balancer|ingress|gateways?|flag|NAT))\b"
# Quoted words, code, where links lead, and what "behind" really means.
_FINE = re.compile(
    rf"[\"“]\w+( \w+)?[\"”]|`[^`]*`|\]\([^)]*\)"
    rf"|\b(leav\w+|left|fall\w*) (\w+ )*behind\b|\bbehind (?={_FRONT})|\blook-behind",
    re.IGNORECASE,
)
MOST_WORDS = 10
PATTERNS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "behind": re.compile(r"\bbehind\b", re.IGNORECASE),
        "beside": re.compile(r"\bbeside\b", re.IGNORECASE),
        "nobody": re.compile(r"\bnobody\b", re.IGNORECASE),
        "so many": re.compile(r"\bso many\b", re.IGNORECASE),
        "anew": re.compile(r"\banew\b", re.IGNORECASE),
        # A comment or docstring that begins with "Of" has no subject.
        "Of": re.compile(r"(^|\s)(#|//|\"\"\") ?Of [a-z]"),
        "long name": re.compile(rf"\bdef test(_[a-z0-9]+){{{MOST_WORDS + 1},}}\("),
    }
)
# All lines with a place have one of these. To ask first takes a third of the time.
_SUSPECT = re.compile(r"ehind|eside|obody|o many|new|Of |def test_", re.IGNORECASE)


class Place(NamedTuple):
    path: str
    line: int
    pattern: str
    text: str


def places(paths: Sequence[str]) -> Iterator[Place]:
    """Where the patterns occur in these files, which are relative to the repository's root."""
    for path in paths:
        text = (ROOT / path).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            if _SUSPECT.search(line) is None:
                continue
            rest = _FINE.sub("", line)
            for name, pattern in PATTERNS.items():
                for _ in pattern.finditer(line if name in ("Of", "long name") else rest):
                    yield Place(path, number, name, line.strip())


def readable_files() -> list[str]:
    """All tracked files that people read."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [path for path in listed.splitlines() if _READ.search(path) and not _GENERATED.search(path)]


def room(path: str) -> str:
    """The folder of the first level, of the second one in tests; files of the root are in "."."""
    parts = path.split("/")
    return "." if len(parts) == 1 else "/".join(parts[: min(len(parts) - 1, 2 if parts[0] == "tests" else 1)])


def counts() -> dict[str, Counter[str]]:
    """By room: how often each pattern occurs. Rooms without any are left out."""
    found: dict[str, Counter[str]] = {}
    for place in places(readable_files()):
        found.setdefault(room(place.path), Counter())[place.pattern] += 1
    return found


def table() -> str:
    """Counts by room and pattern, and their sums."""
    found = counts()
    rows = [(name, *(found[name][pattern] for pattern in PATTERNS)) for name in sorted(found)]
    rows.append(("all", *(sum(each[pattern] for each in found.values()) for pattern in PATTERNS)))
    lines = ["".join(f"{number or '':>11}" for number in numbers) for _, *numbers in rows]
    head = f"{'':24}" + "".join(f"{pattern:>11}" for pattern in PATTERNS)
    return "\n".join([head, *(f"{row[0]:24}{line}" for row, line in zip(rows, lines, strict=True)), ""])


def listing(folders: Sequence[str]) -> str:
    """The places in these folders, or files, one a line."""
    chosen = [path for path in readable_files() if any(f"{path}/".startswith(f"{each}/") for each in folders)]
    return "".join(f"{each.path}:{each.line}: {each.pattern}: {each.text}\n" for each in places(chosen))


if __name__ == "__main__":
    sys.stdout.write(listing(sys.argv[1:]) if sys.argv[1:] else table())
