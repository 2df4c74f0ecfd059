from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.parallel.config import ParallelConfig
from engine.settings.device import MOST_GPU_RANKS, Hardware, resolve
from kernels.peer_exchange.region import MOST_RANKS
from mesh.config_values import load
from mesh.errors import ConfigError

CPU = Hardware(cuda_devices=0, free_memory_bytes=1 << 30)
GPU = Hardware(cuda_devices=1, free_memory_bytes=1 << 30)


@pytest.mark.parametrize(("hardware", "expected"), [(CPU, ("cpu", "float32")), (GPU, ("cuda", "bfloat16"))])
def test_auto_takes_the_gpu_where_there_is_one(hardware: Hardware, expected: tuple[str, str]) -> None:
    resolved = resolve(EngineConfig(model_dir=Path("checkpoint")), hardware)
    assert (resolved.device, resolved.dtype) == expected


def test_what_is_set_is_kept() -> None:
    resolved = resolve(EngineConfig(model_dir=Path("checkpoint"), device="cpu", dtype="bfloat16"), GPU)
    assert (resolved.device, resolved.dtype) == ("cpu", "bfloat16")


def test_a_gpu_that_is_not_there_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="torch finds no GPU"):
        resolve(EngineConfig(model_dir=Path("checkpoint"), device="cuda"), CPU)


def test_more_gpu_ranks_than_kernels_join_are_refused() -> None:
    assert MOST_GPU_RANKS == MOST_RANKS
    parallel = ParallelConfig(dp=MOST_GPU_RANKS + 1)
    config = EngineConfig(model_dir=Path("x"), device="cuda", parallel=parallel)
    with pytest.raises(ConfigError, match="9 ranks: at most 8 GPUs"):
        resolve(config, Hardware(cuda_devices=16, free_memory_bytes=0))


def test_more_ranks_than_a_worker_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"asks for 4096 ranks .*at most 1024"):
        ParallelConfig(tp=64, dp=64)


def test_more_ranks_than_gpus_are_refused_in_words() -> None:
    config = EngineConfig(model_dir=Path("checkpoint"), parallel=ParallelConfig(tp=2))
    assert resolve(config, CPU).device == "cpu"
    assert resolve(config, Hardware(2, 1 << 30)).device == "cuda"
    with pytest.raises(ConfigError, match="2 ranks, each on a GPU of its own, and torch finds 1"):
        resolve(config, GPU)


@pytest.mark.parametrize(("kv_dtype", "expected"), [("auto", "bfloat16"), ("float8_e4m3fn", "float8_e4m3fn")])
def test_kv_is_stored_as_the_model_computes_unless_compressed(kv_dtype: str, expected: str) -> None:
    config = EngineConfig.model_validate({"model_dir": "checkpoint", "kv_dtype": kv_dtype})
    assert resolve(config, GPU).kv_dtype == expected


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "float32"), ("float8_e4m3fn", "float8_e4m3fn")])
def test_prompts_attend_as_the_model_computes_unless_quantized(dtype: str, expected: str) -> None:
    config = EngineConfig.model_validate({"model_dir": "checkpoint", "prompt_attention_dtype": dtype})
    assert resolve(config, CPU).prompt_attention_dtype == expected


def test_a_gpu_keeps_quantized_weights_and_captures_decode_steps() -> None:
    config = EngineConfig(model_dir=Path("checkpoint"))
    on_gpu, on_cpu = resolve(config, GPU), resolve(config, CPU)
    assert (on_gpu.weights, on_gpu.decode_graphs, on_gpu.kv_memory_fraction) == ("quantized", True, 0.95)
    assert (on_cpu.weights, on_cpu.decode_graphs, on_cpu.kv_memory_fraction) == ("dequantized", False, 0.25)


def test_a_gpu_warms_up_unless_warm_up_is_off() -> None:
    config = EngineConfig(model_dir=Path("checkpoint"))
    assert (resolve(config, GPU).warm_up, resolve(config, CPU).warm_up) == (True, False)
    assert not resolve(config.model_copy(update={"warm_up": "off"}), GPU).warm_up


def test_float32_on_a_gpu_dequantizes() -> None:
    assert resolve(EngineConfig(model_dir=Path("checkpoint"), dtype="float32"), GPU).weights == "dequantized"


def test_quantized_weights_are_refused_in_float32() -> None:
    with pytest.raises(ConfigError, match=r"set engine\.dtype=bfloat16"):
        resolve(EngineConfig(model_dir=Path("checkpoint"), weights="quantized"), CPU)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["backend=model"], "model_dir"),
        (["backend=oracle", "max_requests=100", "max_step_tokens=99"], "max_step_tokens must be at least"),
        (["backend=oracle", "max_request=1"], "max_request"),
        (["backend=oracle", "drafts.next_n=6"], "next_n"),
        (["backend=oracle", "drafts.next_n=3", "max_step_tokens=255"], r"max_requests \* \(1 \+ engine.drafts.next_n"),
        (["backend=oracle", "offload.layers=2"], r"layers=2 saves no memory with engine\.offload\.slots=2: set more"),
        (["backend=oracle", "offload.layers=some"], "layers"),
        (["backend=oracle", "host_blocks=-1"], "host_blocks"),
        (["backend=oracle", "host_blocks=half"], "host_blocks"),
        (["backend=oracle", "host_blocks=9", "prefix_cache=false"], r"set engine\.prefix_cache=true"),
        (
            ["backend=oracle", "offload.layers=auto", "balance.interval_steps=16"],
            r"engine\.offload\.layers does not go with engine\.balance\.interval_steps",
        ),
    ],
)
def test_a_wrong_configuration_names_what_is_wrong(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(EngineConfig, overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.dp=2"], 1000),
        (["parallel.dp=2", "balance.redundant=2"], 1000),
        (["parallel.tp=2"], None),
        (["balance.interval_steps=64"], 64),
        (["balance.interval_steps=null"], None),
        (["parallel.dp=2", "offload.layers=auto"], None),
        (["parallel.hosts=2", "parallel.dp=4"], None),
    ],
)
def test_experts_move_by_default_between_dp_ranks_of_a_host(overrides: list[str], expected: int | None) -> None:
    config = load(EngineConfig, overrides=["backend=oracle", *overrides])
    assert config.settled_balance == config.balance.model_copy(update={"interval_steps": expected})
