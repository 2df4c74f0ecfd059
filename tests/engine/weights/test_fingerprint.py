"""The digest of a checkpoint's weights."""

import json
from pathlib import Path

import pytest

from engine.weights import fingerprint
from engine.weights.fingerprint import CACHE, weights_fingerprint
from engine.weights.shards import open_shards
from tests.support.checkpoints import edit_config, rewrite_as_one_file, tiny_checkpoint


def flip_a_byte(directory: Path, tensor: int) -> None:
    """The first byte of one tensor, which no sample from its middle would see."""
    with open_shards(directory) as shards:
        entry = sorted(shards.entries.values(), key=lambda each: each.name)[tensor]
    with entry.path.open("r+b") as file:
        file.seek(entry.offset)
        [byte] = file.read(1)
        file.seek(entry.offset)
        file.write(bytes([byte ^ 1]))


def test_it_depends_on_weights_and_configuration_alone(tmp_path: Path) -> None:
    first = weights_fingerprint(tiny_checkpoint(tmp_path / "a"))
    assert weights_fingerprint(tiny_checkpoint(tmp_path / "other", seed=1)) != first
    rewrite_as_one_file(tmp_path / "a")
    assert weights_fingerprint(tmp_path / "a") == first
    edit_config(tmp_path / "a", routed_scaling_factor=1.5)
    assert weights_fingerprint(tmp_path / "a") != first


@pytest.mark.parametrize("tensor", [0, -1])
def test_one_changed_byte_anywhere_changes_it(tmp_path: Path, tensor: int) -> None:
    before = weights_fingerprint(tiny_checkpoint(tmp_path))
    flip_a_byte(tmp_path, tensor)
    assert weights_fingerprint(tmp_path) != before


def test_a_small_checkpoint_leaves_no_file(tmp_path: Path) -> None:
    weights_fingerprint(tiny_checkpoint(tmp_path))
    assert not (tmp_path / CACHE).exists()


def test_a_large_checkpoint_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncached = weights_fingerprint(tiny_checkpoint(tmp_path))
    monkeypatch.setattr(fingerprint, "CACHED_BYTES", 0)
    assert weights_fingerprint(tmp_path) == uncached
    with monkeypatch.context() as reading:
        reading.setattr(fingerprint, "_digest_of", lambda entries: pytest.fail("it was read again"))
        assert weights_fingerprint(tmp_path) == uncached
    flip_a_byte(tmp_path, 0)
    assert weights_fingerprint(tmp_path) != uncached


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"files": {}, "digest": "x"})])
def test_a_cache_that_says_nothing_of_these_files_is_replaced(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncached = weights_fingerprint(tiny_checkpoint(tmp_path))
    monkeypatch.setattr(fingerprint, "CACHED_BYTES", 0)
    (tmp_path / CACHE).write_text(text)
    assert weights_fingerprint(tmp_path) == uncached
    assert json.loads((tmp_path / CACHE).read_text())["digest"]
