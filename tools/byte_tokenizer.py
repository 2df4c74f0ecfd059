"""A byte-level tokenizer of any size that needs no training, with DeepSeek's special tokens and chat form."""

from itertools import islice, product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tools.tokenizer_files import BEGIN, END, PAD, THINKS_IF_ASKED, write_tokenizer_files

CONTROL = (BEGIN, END, PAD)
MARKERS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
BYTES = 256
SMALLEST_VOCABULARY = len(CONTROL) + len(MARKERS) + BYTES
PRINTABLE = [chr(code) for code in range(0x20, 0x7F)]
# Ids of the printable ASCII characters.
READABLE = range(len(CONTROL) + len(MARKERS), len(CONTROL) + len(MARKERS) + len(PRINTABLE))


def write_tokenizer(directory: Path, vocabulary_size: int, context_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; every id below `vocabulary_size` decodes to something."""
    write_tokenizer_files(build_tokenizer(vocabulary_size), directory, context_tokens, THINKS_IF_ASKED)


def build_tokenizer(vocabulary_size: int) -> Tokenizer:
    """Ids: control tokens (begin 0, end 1, pad 2), markers, the 256 bytes with printable ASCII first, then merges."""
    vocabulary, merges = _vocabulary(vocabulary_size)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKERS])
    return tokenizer


def _vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Beyond the bytes, tokens are joined from two earlier ones, shortest first: pairs, then pairs of pairs."""
    alphabet = _byte_characters()
    tokens = [*CONTROL, *MARKERS, *alphabet]
    merges: list[tuple[str, str]] = []
    parts = alphabet
    while len(tokens) < size:
        joined = list(islice(product(parts, parts), size - len(tokens)))
        merges += joined
        parts = ["".join(pair) for pair in joined]
        tokens += parts
    return {token: index for index, token in enumerate(tokens)}, merges


def _byte_characters() -> list[str]:
    """The characters that byte-level BPE writes bytes as: the 95 printable ASCII ones in order, then the other 161."""
    space = "Ġ"
    printable = [space if character == " " else character for character in PRINTABLE]
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(printable))
    return printable + others
