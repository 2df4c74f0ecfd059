"""The tokenizer: byte-level BPE trained on the mixture. Digits and most capitals are tokens of their own."""

from collections.abc import Iterator
from itertools import islice

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from models.train.mixture import ExampleStream
from tools.chat import ASSISTANT, THINK, THINK_END, USER
from tools.tokenizer_files import BEGIN, END, PAD

CONTROL = (BEGIN, END, PAD)
MARKERS = (USER, ASSISTANT, THINK, THINK_END)
# A word includes the space before it. Digits never join, so that arithmetic sees each one. Capitals that begin no word
# never join either, so that codes are spelled letter by letter.
PIECES = r" ?\p{Lu}?\p{Ll}+|\p{N}|\p{Lu}| ?[\p{Lt}\p{Lm}\p{Lo}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
SAMPLE_EXAMPLES = 20_000


def train_tokenizer(stream: ExampleStream, vocabulary_size: int, examples: int = SAMPLE_EXAMPLES) -> Tokenizer:
    """Ids: begin 0, end 1, pad 2, the markers, the 256 bytes, then merges learned from this many examples."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[AddedToken(text, normalized=False, special=text in CONTROL) for text in (*CONTROL, *MARKERS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(stream, examples), trainer)
    assert tokenizer.get_vocab_size() == vocabulary_size
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, 0)]
    )
    return tokenizer


def _texts(stream: ExampleStream, examples: int) -> Iterator[str]:
    """Texts of the mixture, then the whole library, whose words would be rare in the mixture alone."""
    for example in islice(stream, examples):
        yield example.context[:2000] + example.completion
    for entry in stream.library:
        yield entry.document
