"""Reads a vocabulary in tiktoken's form (`tiktoken.model`, as Moonshot publishes it) as a tokenizer.json.

tiktoken merges the adjacent pair whose union has the lowest rank, and takes a piece whole if it is a token. The file
has ranks and no pairs. A token arises from the same last pair wherever its bytes stand, because no merge inside of it
depends on what is around it: so the merges of a tokenizer.json are, for each token, the two parts that merging leaves
if tokens of its own and of higher ranks are not made.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from mesh.errors import ConfigError
from mesh.text.byte_level import letters_of_bytes

TIKTOKEN_FILE = "tiktoken.model"
# How Moonshot's tokenizer splits text before it merges (Kimi-K2-Instruct's and Moonlight's tokenization code).
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERNS: Mapping[str, str] = {
    "TikTokenTokenizer": "|".join(
        (
            r"[\p{Han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
}
# Ids after the ranks that are control tokens, whether tokenizer_config.json names them or not.
_RESERVED = 256
_DAMAGED = "the file is cut or damaged, download it again"


def tokenizer_json(path: Path, settings: Mapping[str, Any]) -> bytes:
    """The tokenizer as a tokenizer.json.

    settings: tokenizer_config.json, which names the class (and so the pattern) and the control tokens. Takes seconds
    for 160,000 tokens. Raises ConfigError if the file is malformed or the class unknown.
    """
    kind = str(settings.get("tokenizer_class"))
    if kind not in PATTERNS:
        raise ConfigError(f"{path}: how {kind} splits text is unknown; known is {', '.join(PATTERNS)}")
    ranks = read_ranks(path)
    return json.dumps(_description(ranks, _control_tokens(path, len(ranks), settings), PATTERNS[kind])).encode()


def count_tokens(path: Path, settings: Mapping[str, Any]) -> int:
    """How many tokens `tokenizer_json` describes, the control tokens among them. Raises ConfigError as that does."""
    return max(_control_tokens(path, len(read_ranks(path)), settings)) + 1


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token ids by the tokens' bytes. Raises ConfigError."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(f"{path}, line {number}: expected a token in base64 and its rank: {_DAMAGED}") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(f"{path}: {len(ranks)} tokens do not have the ranks from 0 on: {_DAMAGED}")
    if missing := [byte for byte in range(256) if bytes((byte,)) not in ranks]:
        raise ConfigError(f"{path}: no token for byte {missing[0]}: {_DAMAGED}")
    return ranks


def merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pair that makes each token of several bytes, in the order of ranks. Tokens that no pair makes have none."""
    for token, rank in ranks.items():
        if len(token) == 1:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if ranks.get(pair[0], rank) < rank and ranks.get(pair[1], rank) < rank]
        # A token of one pair alone may still be out of reach, but then no text reaches that pair either.
        pair = known[0] if len(known) == 1 else _last_pair(token, rank, ranks)
        if pair is not None:
            yield pair


def _last_pair(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        lowest = min(joined)
        if lowest == rank:
            return None
        index = joined.index(lowest)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts[0], parts[1]


def _control_tokens(path: Path, first: int, settings: Mapping[str, Any]) -> dict[int, str]:
    named = settings.get("added_tokens_decoder") or {}
    try:
        texts = {int(token_id): str(token["content"]) for token_id, token in named.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder is malformed") from error
    last = max([first + _RESERVED - 1, *texts])
    return {token_id: texts.get(token_id, f"<|reserved_token_{token_id}|>") for token_id in range(first, last + 1)}


def _description(ranks: Mapping[bytes, int], control: Mapping[int, str], pattern: str) -> dict[str, Any]:
    letters = letters_of_bytes()
    spelled = {token: token.decode("latin-1").translate(letters) for token in ranks}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    ordered = dict(sorted(ranks.items(), key=lambda item: item[1]))
    return {
        "version": "1.0",
        "added_tokens": [{"id": token_id, "content": text, **flags} for token_id, text in control.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {spelled[token]: rank for token, rank in ordered.items()},
            "merges": [[spelled[left], spelled[right]] for left, right in merges(ordered)],
        },
    }
