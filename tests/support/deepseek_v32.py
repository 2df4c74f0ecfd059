"""A checkpoint's files as DeepSeek-V3.2 publishes them, with the tokenizer of tests."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gateway.prompts.chat import ChatTemplate
from gateway.prompts.deepseek_v32 import DeepSeekV32
from gateway.prompts.tokenizer import Tokenizer, load_tokenizer
from gateway.tool_formats.dsml_reader import DSML
from tests.support.tokenizers import tokenizer_directory
from tools.tokenizer_files import PAD


def write_checkpoint(directory: Path, model_type: str | None = "deepseek_v32", **settings: Any) -> None:
    """The tokenizer of tests in the files of DeepSeek-V3.2: no chat template, and a token for DSML's marker."""
    ours = tokenizer_directory()
    text = (ours / "tokenizer.json").read_text(encoding="utf-8").replace(PAD, DSML)
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    given = json.loads((ours / "tokenizer_config.json").read_text(encoding="utf-8"))
    del given["chat_template"], given["pad_token"]
    (directory / "tokenizer_config.json").write_text(json.dumps({**given, **settings}), encoding="utf-8")
    if model_type is not None:
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as directory:
        write_checkpoint(Path(directory))
        return load_tokenizer(Path(directory))


@cache
def chat_template() -> ChatTemplate:
    return ChatTemplate(DeepSeekV32(tokenizer()), tokenizer())
