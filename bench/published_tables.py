"""NVIDIA's published latencies of single operations on an H200, at the shapes of our own benchmarks.

`python -m bench.published_tables`, with `pip install aiconfigurator-core==0.12.0 pyarrow`: that package's tables hold
what NVIDIA measured of SGLang, TensorRT-LLM and vLLM. They are not runs of ours, and cards differ by some percent.
Needs no GPU. docs/performance.md compares our figures with them.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SYSTEM = "h200_sxm"
SGLANG, TENSORRT_LLM, VLLM = "sglang/0.5.14", "trtllm/1.3.0rc20", "vllm/0.24.0"
REQUESTS = (8, 32, 64, 128)
# DeepSeek-R1's routed experts, divided over eight ranks.
R1_EXPERTS = {
    "hidden_size": 7168,
    "inter_size": 2048,
    "num_experts": 256,
    "topk": 8,
    "moe_ep_size": 8,
    "moe_tp_size": 1,
    "moe_dtype": "fp8_block",
}


@dataclass(frozen=True)
class Operation:
    """An operation in one setting, with its times over the values of one column."""

    name: str
    # The tables that have it, below the system's folder.
    tables: Sequence[str]
    # What the other columns must be.
    where: Mapping[str, object]
    over: str
    values: Sequence[int]
    # The columns whose sum is the time, and the factor that makes it microseconds.
    times: Sequence[str] = ("latency",)
    factor: float = 1000.0

    @property
    def columns(self) -> list[str]:
        return [*self.where, self.over, *self.times]

    def us(self, rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
        """Microseconds by value of `over`: those of the engine's fastest kernel."""
        found: dict[int, float] = {}
        for row in rows:
            value = row[self.over]
            if value in self.values and all(row[column] == wanted for column, wanted in self.where.items()):
                took = self.factor * sum(row[column] for column in self.times)
                found[value] = min(took, found.get(value, took))
        return found


def operations() -> list[Operation]:
    """Every operation that one of our benchmarks times too."""
    return [
        *_decode_attention(),
        Operation(
            "MLA of a prompt, 128 heads, bf16, by tokens",
            [f"mla/{TENSORRT_LLM}/context_mla"],
            {"num_heads": 128, "batch_size": 1, "step": 0, "kv_cache_dtype": "bfloat16"},
            "isl",
            (4096, 8192, 32768),
        ),
        Operation(
            "decode attention with its projections, FP8, 4,096 tokens, by requests",
            [f"mla/{engine}/mla_generation_module" for engine in (TENSORRT_LLM, VLLM)],
            {"num_heads": 128, "kv_cache_dtype": "fp8", "gemm_type": "fp8_block", "step": 4096},
            "batch_size",
            REQUESTS,
        ),
        *_routed_experts(),
        Operation(
            "DeepEP, low latency, eight GPUs: dispatch and combine, by tokens a rank",
            ["comm/sglang/0.5.12/wideep_deepep_ll"],
            {"hidden_size": 7168, "num_topk": 8, "num_experts": 256, "node_num": 1},
            "num_token",
            REQUESTS,
            ("dispatch_avg_t_us", "combine_avg_t_us"),
            1.0,
        ),
        *_all_reduce(),
        *_sparse_attention(),
    ]


def _decode_attention() -> Iterable[Operation]:
    for heads in (128, 16):
        for dtype in ("bfloat16", "fp8"):
            yield Operation(
                f"MLA decode, {heads} heads, {dtype} KV, 4,096 tokens, by requests",
                [f"mla/{engine}/generation_mla" for engine in (SGLANG, TENSORRT_LLM)],
                {"num_heads": heads, "kv_cache_dtype": dtype, "step": 4095},
                "batch_size",
                (1, *REQUESTS, 256),
            )


def _routed_experts() -> Iterable[Operation]:
    # SGLang calls even choices "uniform" in the table of its masked products, which decode steps take.
    tables = {
        "balanced": [f"moe/{engine}/moe" for engine in (SGLANG, TENSORRT_LLM, VLLM)],
        "uniform": ["moe/sglang/0.5.10/wideep_generation_moe"],
    }
    for distribution, files in tables.items():
        yield Operation(
            "routed experts of one of eight ranks, FP8, by tokens of all ranks",
            files,
            {**R1_EXPERTS, "distribution": distribution},
            "num_tokens",
            (8, 64, 256, 512, 768, 1024, 4096, 16384),
        )


def _all_reduce() -> Iterable[Operation]:
    for gpus in (2, 4, 8):
        yield Operation(
            f"all-reduce of {gpus} GPUs, by bytes",
            [f"comm/{engine}/custom_allreduce" for engine in (SGLANG, TENSORRT_LLM, VLLM)],
            {"num_gpus": gpus},
            "message_size",
            (16384, 65536),
        )


def _sparse_attention() -> Iterable[Operation]:
    for context in (4096, 32768, 131072):
        yield Operation(
            f"DeepSeek-V3.2: decode attention with its projections, FP8, {context:,} tokens, by requests",
            [f"sparse_attention/{engine}/dsa_generation_module" for engine in (SGLANG, "trtllm/1.3.0rc23", VLLM)],
            {
                "model": "deepseek-ai/DeepSeek-V3.2",
                "num_heads": 128,
                "gemm_type": "fp8_block",
                "step": context,
                "tp_size": 1,
            },
            "batch_size",
            REQUESTS,
        )


def read_times(folder: Path) -> Iterable[tuple[Operation, str, dict[int, float]]]:
    """Each operation with each of its tables in the package's folder, and the microseconds that it says."""
    parquet = import_module("pyarrow.parquet")
    for operation in operations():
        for table in operation.tables:
            rows = parquet.read_table(folder / f"{table}_perf.parquet", columns=operation.columns)
            yield operation, table, operation.us(rows.to_pylist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    package = find_spec("aiconfigurator_core")
    if package is None or package.origin is None or find_spec("pyarrow") is None:
        parser.error("the tables are missing: pip install aiconfigurator-core==0.12.0 pyarrow")
    printed = Table("operation", "table", "microseconds")
    for operation, table, us in read_times(Path(package.origin).parent / "systems" / "data" / SYSTEM):
        cells = "  ".join(f"{value:,}: {us[value]:,.1f}" for value in operation.values if value in us)
        printed.add_row(operation.name, table, cells or "none")
    Console(width=200).print(printed)


if __name__ == "__main__":
    main()
