import json
import random
from pathlib import Path

import pytest
import tiktoken
from tokenizers import Tokenizer

from mesh.errors import ConfigError
from mesh.text.tiktoken_file import PATTERNS, read_ranks
from mesh.text.tokenizer_file import count_tokens, read_tokenizer
from tests.support.tiktoken_models import write_tiktoken_model

TEXTS = 2000
# What the pattern tells apart: scripts, cases, digits, marks, spaces, line ends, contractions, several code points.
PIECES = [*"aZz09 .,-_'\"\n\r\t", "  ", "   \n", "'s", "'LL", "don't", "汉字", "かな", "한글", "\u00e9", "\u01c5"]
PIECES += ["\u02b0", "\u05e9", "\u0627", "\U0001f469\u200d\U0001f4bb", "\u0301"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiktoken")
    write_tiktoken_model(made)
    return made


def drawn_texts(directory: Path) -> list[str]:
    """Code, prose, and pieces of any script; every third is of whole tokens in any order."""
    drawn, tokens = random.Random(0), list(read_ranks(directory / "tiktoken.model"))
    source = Path(__file__).read_text(encoding="utf-8") + (json.__doc__ or "")
    texts = []
    for number in range(TEXTS):
        if number % 3 == 0:
            start = drawn.randrange(len(source))
            texts.append(source[start : start + drawn.randrange(1, 300)])
        elif number % 3 == 1:
            texts.append("".join(drawn.choice(PIECES) for _ in range(drawn.randrange(1, 60))))
        else:
            texts.append(b"".join(drawn.choice(tokens) for _ in range(20)).decode(errors="replace"))
    return texts


def test_token_ids_are_those_of_tiktoken(directory: Path) -> None:
    ranks = read_ranks(directory / "tiktoken.model")
    original = tiktoken.Encoding(
        "original", pat_str=PATTERNS["TikTokenTokenizer"], mergeable_ranks=ranks, special_tokens={}
    )
    # The gateway matches control tokens itself.
    plain = json.loads(read_tokenizer(directory)) | {"added_tokens": []}
    ours = Tokenizer.from_str(json.dumps(plain))
    for text in drawn_texts(directory):
        assert ours.encode(text, add_special_tokens=False).ids == original.encode_ordinary(text), text


def test_control_tokens_follow_the_ranks(directory: Path) -> None:
    first = len(read_ranks(directory / "tiktoken.model"))
    added = {token["id"]: token["content"] for token in json.loads(read_tokenizer(directory))["added_tokens"]}
    names = ["[BOS]", "[EOS]", "<|im_end|>", f"<|reserved_token_{first + 3}|>"]
    assert [added[first + place] for place in range(4)] == names
    assert count_tokens(directory) == max(added) + 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"IQ== 0\nIg== x\n", "line 2: expected a token in base64 and its rank"),
        (b"!!!! 0\n", "line 1: expected a token in base64 and its rank"),
        (b"IQ== 0\nIg== 2\n", "the file is cut or damaged"),
        (b"IQ== 0\nIg== 1\n", "no token for byte 0"),
        (b"", "no token for byte 0"),
    ],
    ids=["rank", "base64", "gap", "bytes", "empty"],
)
def test_a_damaged_file_is_refused(content: bytes, complaint: str, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_bytes((directory / "tokenizer_config.json").read_bytes())
    with pytest.raises(ConfigError, match=complaint):
        read_tokenizer(tmp_path)


def test_a_truncated_file_is_refused(directory: Path, tmp_path: Path) -> None:
    whole = (directory / "tiktoken.model").read_bytes()
    (tmp_path / "tokenizer_config.json").write_bytes((directory / "tokenizer_config.json").read_bytes())
    (tmp_path / "tiktoken.model").write_bytes(whole[: len(whole) // 100])
    with pytest.raises(ConfigError, match=r"tiktoken\.model"):
        read_tokenizer(tmp_path)


def test_an_unknown_class_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "QWenTokenizer"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="QWenTokenizer splits text is unknown"):
        read_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected tokenizer\.json or tiktoken\.model"):
        read_tokenizer(tmp_path)
