"""A checkpoint's tokenizer: text to token ids, token ids to bytes."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from tokenizers import Tokenizer as VocabularyTokenizer

from gateway.text.reasoning import THINK_CLOSE, THINK_OPEN
from gateway.text.signs import Signs
from gateway.tool_formats.choice import MARKERS
from mesh.errors import ConfigError
from mesh.text.byte_level import letters_of_bytes
from mesh.text.tokenizer_file import read_tokenizer, read_tokenizer_settings, tokenizer_path

# Special tokens that stay in an answer's text, because later stages split it at them.
SHOWN = frozenset((THINK_OPEN, THINK_CLOSE)) | MARKERS
NULL = msgspec.Raw(b"null")

SectionT = TypeVar("SectionT")


class _AddedToken(msgspec.Struct):
    id: int
    content: Annotated[str, msgspec.Meta(min_length=1)]
    special: bool = False


class _Special(msgspec.Struct):
    id: str


class _Piece(msgspec.Struct):
    """A part of a processor's template: a control token, or the text."""

    control: _Special | None = msgspec.field(default=None, name="SpecialToken")


class _Processor(msgspec.Struct):
    """The post_processor of tokenizer.json, as far as it says what a text begins with."""

    processors: list["_Processor"] = []
    single: list[_Piece] = []

    def prepends(self, token: str) -> bool:
        """Whether it puts this control token before a single text."""
        begin = self.single[0].control if self.single else None
        return (begin is not None and begin.id == token) or any(each.prepends(token) for each in self.processors)


class Tokenizer:
    """Byte-level BPE with its own matching of control tokens.

    Control tokens (the file's added tokens: <|User|>, <think>, end of sequence) are matched here rather than in the
    library, so that `encode` can tell those that a chat template wrote from those that a client wrote.
    """

    def __init__(
        self,
        vocabulary: VocabularyTokenizer,
        added: list[_AddedToken],
        settings: Mapping[str, Any],
        processor: _Processor,
    ) -> None:
        self._vocabulary = vocabulary
        self._control = {token.content: token.id for token in added}
        self._control_text = {token.id: token.content for token in added}
        self._hidden = {token.id for token in added if token.special and token.content not in SHOWN}
        # Without control tokens this is a pattern that matches nowhere.
        self._splitter = re.compile(f"({_prefix_pattern(list(self._control)) or '(?!)'})")
        self._bytes_of_character = {letter: byte for byte, letter in letters_of_bytes().items()}
        self._token_bytes: dict[int, bytes] = {}
        self.settings = settings
        # How the tokens in SHOWN appear in the text of an answer while it is read.
        self.signs = Signs(SHOWN, self.control_id)
        # The characters that a control token can begin with.
        self.control_starts = sorted({token.content[0] for token in added})
        self.beginning = self._named("bos_token")
        self.end = self._named("eos_token")
        asked = settings.get("add_bos_token")
        prepends = self.beginning is not None and processor.prepends(self.beginning)
        self._prepends_beginning = asked if isinstance(asked, bool) else prepends

    def encode(self, text: str, reveal: Callable[[str], str] | None = None) -> list[int]:
        """Token ids of the text; control tokens in it are recognized. Nothing is added before or after.

        `reveal` is applied to the text between control tokens; its result is not searched for control tokens.
        """
        token_ids: list[int] = []
        for index, piece in enumerate(self._splitter.split(text)):
            if index % 2:
                token_ids.append(self._control[piece])
            elif piece:
                token_ids += self._encode_plain(reveal(piece) if reveal is not None else piece)
        return token_ids

    def encode_prompt(self, text: str) -> list[int]:
        """As `encode`, after a beginning-of-sequence token if the model wants one and the text has none."""
        token_ids = self.encode(text)
        if self._prepends_beginning and self.beginning is not None:
            beginning = self._control.get(self.beginning)
            if beginning is not None and token_ids[:1] != [beginning]:
                token_ids.insert(0, beginning)
        return token_ids

    def _encode_plain(self, text: str) -> list[int]:
        # Only the batch call can leave out offsets, which take five times the memory and the time.
        (encoding,) = self._vocabulary.encode_batch_fast([text], add_special_tokens=False)
        token_ids: list[int] = encoding.ids
        return token_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the answer's text; none for special tokens and for ids that the vocabulary
        lacks.
        """
        known = self._token_bytes.get(token_id)
        if known is None:
            known = b"" if token_id in self._hidden else self._spelled(token_id)
            self._token_bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """A token by itself, for reports of log probabilities; special tokens by name."""
        return self._spelled(token_id).decode(errors="replace")

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Each token by itself, as `token_text` gives it."""
        texts = {token_id: self.token_text(token_id) for token_id in set(token_ids)}
        return [texts[token_id] for token_id in token_ids]

    def spell(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens; special tokens by name."""
        spelled = {token_id: self._spelled(token_id) for token_id in set(token_ids)}
        return b"".join(map(spelled.__getitem__, token_ids)).decode(errors="replace")

    def control_id(self, text: str) -> int | None:
        """The id of the control token with this text; None if the model has none."""
        return self._control.get(text)

    def _spelled(self, token_id: int) -> bytes:
        control = self._control_text.get(token_id)
        if control is not None:
            return control.encode()
        letters = self._vocabulary.id_to_token(token_id)
        return bytes(self._bytes_of_character[letter] for letter in letters) if letters is not None else b""

    def _named(self, key: str) -> str | None:
        value = self.settings.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read a checkpoint's tokenizer and tokenizer_config.json.

    Raises ConfigError if they are missing, malformed, or not byte-level BPE.
    """
    path = tokenizer_path(directory) or directory
    sections = _sections(read_tokenizer(directory), path)
    added = _section(sections, "added_tokens", list[_AddedToken], path) or []
    processor = _section(sections, "post_processor", _Processor, path) or _Processor()
    # The library must not match control tokens, shorten or pad a prompt, or add tokens to it.
    sections |= dict.fromkeys(("truncation", "padding", "post_processor"), NULL)
    sections["added_tokens"] = msgspec.Raw(b"[]")
    if b'"ByteLevel"' not in bytes(sections.get("decoder", NULL)):
        raise ConfigError(f"{path}: not a byte-level BPE tokenizer, as DeepSeek's are")
    try:
        vocabulary = VocabularyTokenizer.from_buffer(msgspec.json.encode(sections))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    spelled_out = [token for token in added if not token.content.isspace()]
    return Tokenizer(vocabulary, spelled_out, read_tokenizer_settings(directory), processor)


def _sections(description: bytes, path: Path) -> dict[str, msgspec.Raw]:
    """The top level; large parts stay as bytes, since 130,000 parsed tokens would take 100 MB."""
    try:
        return msgspec.json.decode(description, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def _section(sections: Mapping[str, msgspec.Raw], name: str, form: type[SectionT], path: Path) -> SectionT | None:
    """None for a section that is missing or null."""
    try:
        return msgspec.json.decode(sections.get(name, NULL), type=form | None)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {name}: {error}") from error


def _prefix_pattern(words: Sequence[str]) -> str:
    """A regular expression for the longest of `words` at a position. Its time does not depend on the number of words.

    Words share their prefixes in it. DeepSeek has 1,283 control tokens that begin with "<", and text may be full of it.
    """
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[:1], []).append(word[1:])
    ends_here = rests.pop("", None) is not None
    branches = [re.escape(character) + _prefix_pattern(rest) for character, rest in rests.items()]
    pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
    return f"(?:{pattern})?" if ends_here and branches else pattern
