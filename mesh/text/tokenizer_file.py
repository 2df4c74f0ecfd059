"""Finds a checkpoint's tokenizer, in whichever form it is published, and gives it as a tokenizer.json."""

from pathlib import Path
from typing import Any

import msgspec

from mesh.errors import ConfigError
from mesh.text import tiktoken_file
from mesh.text_files import read_text

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
# The first that a checkpoint has is read.
FORMS = (TOKENIZER_FILE, tiktoken_file.TIKTOKEN_FILE)


class _Token(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[Any] = []


class NumberedTokens(msgspec.Struct):
    """The part of a tokenizer.json that numbers tokens."""

    model: _Vocabulary = _Vocabulary()
    added_tokens: list[_Token] = []


def tokenizer_path(directory: Path) -> Path | None:
    """The file with the vocabulary; None if there is none."""
    return next((directory / name for name in FORMS if (directory / name).is_file()), None)


def read_tokenizer(directory: Path) -> bytes:
    """The bytes of a tokenizer.json. Raises ConfigError if there is no tokenizer or if it is malformed."""
    path = tokenizer_path(directory)
    if path is None:
        raise ConfigError(f"{directory} has no tokenizer: expected {' or '.join(FORMS)}")
    if path.name == tiktoken_file.TIKTOKEN_FILE:
        return tiktoken_file.tokenizer_json(path, read_tokenizer_settings(directory))
    try:
        return read_text(path).encode()
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}") from error


def count_tokens(directory: Path) -> int:
    """One more than the highest token id of a directory that has a tokenizer. Raises ConfigError if it is malformed."""
    path = tokenizer_path(directory)
    assert path is not None, "the caller has looked for a tokenizer"
    if path.name == tiktoken_file.TIKTOKEN_FILE:
        return tiktoken_file.count_tokens(path, read_tokenizer_settings(directory))
    try:
        tokens = msgspec.json.decode(read_tokenizer(directory), type=NumberedTokens)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    vocabulary = tokens.model.vocab
    known = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return 1 + max([*known, *(token.id for token in tokens.added_tokens)], default=-1)


def read_tokenizer_settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty if the checkpoint has none. Raises ConfigError if it is malformed."""
    path = directory / SETTINGS_FILE
    try:
        return msgspec.json.decode(read_text(path), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
