"""Which models' KV means the same, as their backends say it."""

from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from mesh.domain.kv_identity import KvNamespace
from tests.support.checkpoints import edit_config, model_backend, tiny_checkpoint
from tests.support.int4 import WIDE
from tools.make_checkpoint import make_checkpoint


def namespace_of(directory: Path, **settings: Any) -> KvNamespace:
    return model_backend(directory, **settings).namespace


def unlike_namespaces(directory: Path) -> dict[str, KvNamespace]:
    """Workers of one small model that differ in one thing each."""
    model, other = tiny_checkpoint(directory / "model"), tiny_checkpoint(directory / "other", seed=1)
    rotated = tiny_checkpoint(directory / "rotated")
    edit_config(rotated, rope_theta=20000)
    return {
        "reference": namespace_of(model),
        "its copy": namespace_of(tiny_checkpoint(directory / "copy")),
        "weights": namespace_of(other),
        "positions": namespace_of(rotated),
        "declared name": namespace_of(model, kv_namespace="name"),
        "FP8 KV": namespace_of(model, kv_dtype="float8_e4m3fn"),
        "FP8 KV, other scale": namespace_of(model, kv_dtype="float8_e4m3fn", kv_scale=0.5),
        "drafts": namespace_of(model, drafts={"next_n": 1}),
    }


def test_every_pair_of_unlike_models_shares_what_means_the_same(tmp_path: Path) -> None:
    namespaces = unlike_namespaces(tmp_path)
    sharing = {
        pair
        for pair in combinations_with_replacement(namespaces, 2)
        if len({namespaces[each].digest for each in pair}) == 1
    }
    same = ("reference", "its copy", "drafts")
    assert sharing == {(name, name) for name in namespaces} | set(combinations_with_replacement(same, 2))
    assert (namespaces["drafts"].draft_layers, namespaces["reference"].draft_layers) == (1, 0)


def test_fp8_and_int4_share_kv_only_if_told_to(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "fp8", "tiny", dtype="float8", overrides=WIDE)
    make_checkpoint(tmp_path / "int4", "tiny", dtype="w4a8", overrides=WIDE)
    assert namespace_of(tmp_path / "fp8") != namespace_of(tmp_path / "int4")
    declared = namespace_of(tmp_path / "fp8", kv_namespace="r1")
    assert declared == namespace_of(tmp_path / "int4", kv_namespace="r1")
    assert declared != namespace_of(tmp_path / "int4", kv_namespace="v3")
    assert declared != namespace_of(tmp_path / "int4", kv_namespace="r1", kv_dtype="float8_e4m3fn")
    assert declared != namespace_of(tmp_path / "fp8")
