"""Vocabularies in tiktoken's form, as Moonshot publishes them."""

import base64
import json
from pathlib import Path

from launcher.shipped_model import shipped_model
from mesh.text.byte_level import letters_of_bytes
from mesh.text.tokenizer_file import read_tokenizer

CONTROL = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2}


def write_tiktoken_model(directory: Path) -> None:
    """tiny-r1's vocabulary as tiktoken.model, with tokenizer_config.json. Control tokens follow the last rank."""
    description = json.loads(read_tokenizer(shipped_model()))
    added = {token["content"] for token in description["added_tokens"]}
    bytes_of = {letter: byte for byte, letter in letters_of_bytes().items()}
    vocabulary = sorted(description["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [bytes(bytes_of[letter] for letter in text) for text, _ in vocabulary if text not in added]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n", encoding="utf-8")
    control = {str(len(tokens) + place): {"content": text, "special": True} for text, place in CONTROL.items()}
    settings = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": control, "eos_token": "[EOS]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
