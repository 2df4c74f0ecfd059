import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models

from gateway.prompts.tokenizer import Tokenizer, load_tokenizer
from mesh.errors import ConfigError
from tests.support.fake_decode import VOCABULARY
from tests.support.gateways import model_texts
from tests.support.tokenizers import tokenizer_directory
from tools.byte_tokenizer import MARKERS, build_tokenizer
from tools.tokenizer_files import BEGIN, END

LIBRARY = build_tokenizer(VOCABULARY)
TEXT = st.lists(st.one_of(st.sampled_from([*MARKERS, BEGIN, END, "<", "think>", "｜>"]), st.text(max_size=5))).map(
    "".join
)


def tokenizer() -> Tokenizer:
    found = model_texts()["oracle"].tokenizer
    assert found is not None
    return found


def edited(directory: Path, **settings: Any) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((tokenizer_directory() / name).read_bytes())
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return directory


@given(TEXT)
def test_text_is_tokenized_as_the_library_does(text: str) -> None:
    assert tokenizer().encode(text) == LIBRARY.encode(text, add_special_tokens=False).ids


def test_the_longest_control_token_wins() -> None:
    assert tokenizer().encode("<think></think>") == [LIBRARY.token_to_id("<think>"), LIBRARY.token_to_id("</think>")]


def test_a_prompt_begins_with_the_beginning_once() -> None:
    begin = LIBRARY.token_to_id(BEGIN)
    assert tokenizer().encode_prompt("a")[0] == begin
    assert tokenizer().encode_prompt(BEGIN + "a").count(begin) == 1


def test_a_checkpoint_may_do_without_the_beginning(tmp_path: Path) -> None:
    loaded = load_tokenizer(edited(tmp_path, add_bos_token=False))
    assert loaded.encode_prompt("a") == LIBRARY.encode("a", add_special_tokens=False).ids


NOTHING = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
BEGINNING = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": BEGIN}}, {"Sequence": {"id": "A"}}]}


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize(
    "processor", [None, NOTHING, BEGINNING, {"type": "Sequence", "processors": [NOTHING, BEGINNING]}]
)
def test_the_setting_or_the_file_says_whether_to_begin(
    asked: bool | None, processor: dict[str, Any] | None, tmp_path: Path
) -> None:
    path = edited(tmp_path, add_bos_token=asked) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": processor}))
    adds = load_tokenizer(tmp_path).encode_prompt("a")[0] == LIBRARY.token_to_id(BEGIN)
    assert adds is (processor not in (None, NOTHING) if asked is None else asked)


def test_token_names_may_come_as_objects(tmp_path: Path) -> None:
    assert load_tokenizer(edited(tmp_path, bos_token={"content": BEGIN})).beginning == BEGIN


def test_special_tokens_are_not_text_but_have_a_name() -> None:
    end = LIBRARY.token_to_id(END)
    assert end is not None
    assert tokenizer().token_bytes(end) == b""
    assert tokenizer().token_text(end) == END


def test_ids_beyond_the_vocabulary_are_no_text() -> None:
    assert tokenizer().token_bytes(VOCABULARY + 7) == b""


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer: expected tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_malformed_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("added_tokens", [{"id": "x"}]),
        ("added_tokens", [{"id": 1, "content": ""}]),
        ("post_processor", {"processors": 5}),
        ("post_processor", {"single": [{"SpecialToken": "x"}]}),
    ],
)
def test_a_malformed_section_is_named(section: str, value: object, tmp_path: Path) -> None:
    path = edited(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), section: value}))
    with pytest.raises(ConfigError, match=rf"tokenizer\.json: {section}: "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_of_another_encoding_is_named(name: str, tmp_path: Path) -> None:
    (edited(tmp_path) / name).write_bytes('{"name": "Straße"}'.encode("iso-8859-1"))
    with pytest.raises(ConfigError, match=rf"cannot read .*{name}: it is no text in UTF-8"):
        load_tokenizer(tmp_path)


def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path) -> None:
    LibraryTokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="not a byte-level BPE tokenizer"):
        load_tokenizer(tmp_path)
