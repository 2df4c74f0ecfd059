"""Vendors' packages of several versions, in stand-ins: which are used, and which are left alone with a warning."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.act_quant import Quantized
from kernels.fp8_gemm import block_scaled, deep_gemm
from kernels.fp8_gemm import reference as product
from kernels.mla_decode import DecodePlan, flash_mla, plan_decode, reference
from kernels.vendor import find_package

CPU = torch.device("cpu")
LATENT, WIDTH = 512, 576


def attention(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, None]:
    """What every version computes, from their arguments."""
    rows, queries, heads, width = q.shape
    assert cache.shape[2] == 1 and causal == (queries > 1)
    plan: DecodePlan = plan_decode(table, lengths, queries)
    found = reference.mla_decode(q.view(-1, heads, width), cache.squeeze(2), plan, LATENT, scale, 1.0)
    return found.view(rows, queries, heads, LATENT), None


class Schedule:
    """Made empty by the versions that fill it at the first call."""


def of_2025() -> ModuleType:
    """Schedules are made of the lengths."""

    def get_mla_metadata(
        cache_seqlens: torch.Tensor, num_heads_per_head_k: int, num_heads_k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert num_heads_k == 1
        return cache_seqlens * num_heads_per_head_k, cache_seqlens

    def flash_mla_with_kvcache(
        q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, cache_seqlens: torch.Tensor,
        head_dim_v: int, tile_scheduler_metadata: torch.Tensor, num_splits: torch.Tensor,
        softmax_scale: float | None = None, causal: bool = False,
    ) -> Any:  # fmt: skip
        assert softmax_scale is not None and head_dim_v == LATENT and torch.equal(num_splits, cache_seqlens)
        assert torch.equal(tile_scheduler_metadata, cache_seqlens * q.shape[1] * q.shape[2])
        return attention(q, k_cache, block_table, cache_seqlens, softmax_scale, causal)

    return module("flash_mla", get_mla_metadata, flash_mla_with_kvcache)


def of_2026(dense: bool = True) -> ModuleType:
    """Schedules are made at the first call; later releases have no dense attention."""

    def get_mla_metadata(*args: object, **kwargs: object) -> tuple[Schedule, None]:
        return Schedule(), None

    def flash_mla_with_kvcache(
        q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, cache_seqlens: torch.Tensor,
        head_dim_v: int, tile_scheduler_metadata: Schedule, num_splits: None = None,
        softmax_scale: float | None = None, causal: bool = False, is_fp8_kvcache: bool = False, indices: None = None,
    ) -> Any:  # fmt: skip
        assert dense, "Sparse attention is required: `indices` must be provided"
        assert softmax_scale is not None and isinstance(tile_scheduler_metadata, Schedule) and num_splits is None
        return attention(q, k_cache, block_table, cache_seqlens, softmax_scale, causal)

    return module("flash_mla", get_mla_metadata, flash_mla_with_kvcache)


def of_sglang(legacy: bool = True) -> ModuleType:
    """It has dense attention with `use_legacy` alone, in a library of its own that a build may lack."""
    plain = of_2026()

    def flash_mla_with_kvcache(*args: Any, use_legacy: bool = False, **options: Any) -> Any:
        if use_legacy and not legacy:
            raise RuntimeError("The legacy FlashMLA kernels are not available: this wheel was built without them.")
        assert use_legacy, "Sparse attention is required: pass use_legacy=True to reach the legacy one"
        return plain.flash_mla_with_kvcache(*args, **options)

    return module("flash_mla", plain.get_mla_metadata, flash_mla_with_kvcache)


def wrong() -> ModuleType:
    right = of_2025()

    def flash_mla_with_kvcache(*args: Any, **options: Any) -> Any:
        out, log_sum = right.flash_mla_with_kvcache(*args, **options)
        return out * 1.1, log_sum

    return module("flash_mla", right.get_mla_metadata, flash_mla_with_kvcache)


def module(name: str, *functions: Callable[..., Any]) -> ModuleType:
    made = ModuleType(name)
    vars(made).update({function.__name__: function for function in functions})
    return made


@pytest.mark.parametrize("package", [of_2025(), of_2026(), of_sglang()], ids=["2025", "2026", "SGLang's"])
def test_flash_mla_attends_in_each_version_that_has_dense_attention(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    attend = flash_mla.find_attention(CPU)
    assert attend is not None
    query, pool = torch.randn(2, 3, 4, WIDTH).bfloat16(), torch.randn(5, 64, WIDTH).bfloat16()
    plan = plan_decode(torch.tensor([[4, 0], [2, 1]], dtype=torch.int32), torch.tensor([90, 7], dtype=torch.int32), 3)
    expected = reference.mla_decode(query.view(6, 4, WIDTH), pool, plan, LATENT, 0.1, 1.0)
    # A step's later layers have the first one's schedule.
    for _ in range(2):
        assert torch.equal(attend(query, pool.unsqueeze(2), plan, 0.1).view(6, 4, LATENT), expected)


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        (of_2026(dense=False), "AssertionError: Sparse attention is required"),
        (of_sglang(legacy=False), "RuntimeError: The legacy FlashMLA kernels are not available"),
        (wrong(), "a relative error of 0.1"),
        (module("flash_mla", of_2025), "has no get_mla_metadata, flash_mla_with_kvcache"),
    ],
    ids=["without dense attention", "SGLang's without it", "wrong", "of the same name"],
)
def test_flash_mla_that_does_not_attend_is_left_alone(
    package: ModuleType, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    assert flash_mla.find_attention(CPU) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("flash_mla is not used: ") and reason in record.getMessage()


def test_a_build_that_cannot_be_loaded_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(flash_mla.BUILD_VARIABLE, "/nowhere/_flashmla_C.abi3.so")
    assert flash_mla.find_attention(CPU) is None
    assert "OSError" in caplog.text


def gemm(error: float = 0.0) -> ModuleType:
    def fp8_gemm_nt(
        a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor], d: torch.Tensor
    ) -> None:
        d.copy_(product.fp8_gemm(Quantized(*a), block_scaled(*b)) * (1 + error))

    def m_grouped_fp8_gemm_nt_contiguous() -> None: ...

    def fp8_m_grouped_gemm_nt_masked() -> None: ...

    return module("deep_gemm", fp8_gemm_nt, m_grouped_fp8_gemm_nt_contiguous, fp8_m_grouped_gemm_nt_masked)


def test_deep_gemm_is_used_if_it_multiplies_right(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gemm()
    monkeypatch.setitem(sys.modules, "deep_gemm", right)
    assert deep_gemm.find_working(CPU) is right


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        (gemm(error=float("nan")), "a relative error of nan"),
        (module("deep_gemm", gemm), "has no fp8_gemm_nt, m_grouped"),
    ],
    ids=["wrong", "of the same name"],
)
def test_deep_gemm_that_does_not_multiply_is_left_alone(
    package: ModuleType, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", package)
    assert deep_gemm.find_working(CPU) is None
    assert reason in caplog.text


def test_a_package_that_is_not_there_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert find_package("deep_ep", []) is None and not caplog.records


@pytest.mark.parametrize(
    "source",
    [
        "assert False, 'no CUDA toolkit'",
        "import nothing_like_this",
        "raise OSError('undefined symbol')",
        "import subprocess; subprocess.check_call(['false'])",
    ],
)
def test_a_package_that_does_not_load_is_a_warning(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken_package.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_package("broken_package", []) is None
    assert caplog.text.count("broken_package is not used") == 1
