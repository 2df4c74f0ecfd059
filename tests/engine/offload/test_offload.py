"""Experts in host memory, on a CPU. There a copy is done at the moment in which it is queued. If it is queued before
its slot is free, or only after its layer is computed, the tokens are wrong.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from capacity.shapes import EXPERTS, SHAPES
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.exchange.alone import Alone
from engine.exchange.turns import StepTurns
from engine.model import moe
from engine.model.config import parse_model_config
from engine.model.quantization import KeptWeights
from engine.offload.config import OffloadConfig
from engine.offload.experts import OffloadedLayers
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout, Place
from engine.settings.device import Hardware, resolve
from engine.weights import offloading as module
from engine.weights.loading import load_model, make_allocator, random_model
from engine.weights.offloading import Offloading
from mesh.errors import ConfigError
from tests.support.checkpoints import generate, model_backend, random_prompt, tiny_checkpoint
from tests.support.engines import submit_of
from tests.support.int4 import WIDE, int4_checkpoint
from tests.support.layouts import run_layout
from tests.support.nvfp4 import nvfp4_checkpoint

CPU = torch.device("cpu")
LAYERS = 5
BLOCKS = [5, 6, 2, 9, 1]


def fp8_checkpoint(directory: Path) -> Path:
    return tiny_checkpoint(directory, dtype="float8", num_hidden_layers=LAYERS, **WIDE)


# How to make each checkpoint, and the settings with which it is computed: the dtype, and whether weights stay
# quantized.
CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], dict[str, str]]] = {
    "float32": (lambda path: tiny_checkpoint(path, num_hidden_layers=LAYERS), {}),
    "bfloat16": (lambda path: tiny_checkpoint(path, num_hidden_layers=LAYERS), {"dtype": "bfloat16"}),
    "FP8": (fp8_checkpoint, {"dtype": "bfloat16", "weights": "quantized"}),
    "FP8, dequantized": (fp8_checkpoint, {}),
    "INT4": (
        lambda path: int4_checkpoint(path, static=True, pre_scaled=True, num_hidden_layers=LAYERS),
        {"dtype": "bfloat16", "weights": "quantized"},
    ),
    "INT4, scales of each row": (
        lambda path: int4_checkpoint(path, pre_scaled=True, num_hidden_layers=LAYERS),
        {"dtype": "bfloat16", "weights": "quantized"},
    ),
    "NVFP4": (
        lambda path: nvfp4_checkpoint(path, num_hidden_layers=LAYERS),
        {"dtype": "bfloat16", "weights": "quantized"},
    ),
}


def offloading(layers: Any, **settings: Any) -> Offloading:
    config = EngineConfig(model_dir=Path("checkpoint"), offload=OffloadConfig(layers=layers), **settings)
    return Offloading(resolve(config, Hardware(cuda_devices=0, free_memory_bytes=0)))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_experts_in_host_memory_change_no_token(tmp_path: Path, name: str) -> None:
    make, settings = CHECKPOINTS[name]
    # Layers and slots: what a ring of slots does depends on no weight.
    rings = [(2, 1), (3, 2), (4, 2)] if name == "float32" else [(3, 2)]
    directory, prompt = make(tmp_path), random_prompt(80)
    expected = generate(model_backend(directory, **settings), prompt, 4, BLOCKS)
    for layers, slots in rings:
        backend = model_backend(directory, offload=OffloadConfig(layers=layers, slots=slots), **settings)
        assert generate(backend, prompt, 4, BLOCKS) == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=5)


@pytest.mark.parametrize(
    ("parallel", "chunk_tokens", "offload"),
    [
        (ParallelConfig(), 16, OffloadConfig(layers=4)),
        (ParallelConfig(dp=2, ep=2, two_batch="on"), 16, OffloadConfig(layers=2, slots=1)),
        (ParallelConfig(tp=2, ep=1, two_batch="on"), 8192, OffloadConfig(layers=4)),
    ],
    ids=["alone", "dp 2", "tp 2"],
)
def test_ranks_with_drafts_and_micro_batches_get_the_same_tokens(
    checkpoint: Path,
    parallel: ParallelConfig,
    chunk_tokens: int,
    offload: OffloadConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """chunk_tokens: experts compute few tokens at once, or all."""
    monkeypatch.setattr(moe, "CHUNK_TOKENS", chunk_tokens)
    submits = [
        submit_of(key, random_prompt(length, seed=length), 6, ignore_eos=True)
        for key, length in enumerate((1, 63, 65, 130))
    ]

    def tokens(offload: OffloadConfig) -> dict[int, list[int]]:
        config = EngineConfig(
            model_dir=checkpoint,
            device="cpu",
            parallel=parallel,
            drafts=DraftsConfig(next_n=2),
            offload=offload,
            max_step_tokens=96,
            max_requests=8,
            total_blocks=64,
            threads=1,
        )
        return run_layout(config, submits).token_ids

    assert tokens(offload) == tokens(OffloadConfig())


@pytest.mark.parametrize("weights", ["dequantized", "quantized"])
def test_random_experts_are_the_same_in_host_memory(tmp_path: Path, weights: KeptWeights) -> None:
    directory = fp8_checkpoint(tmp_path)
    on_device, offloaded = (
        random_model(directory, torch.bfloat16, CPU, weights, offloading=offloading(layers)) for layers in (0, 4)
    )
    assert offloaded.offloaded is not None
    ring = offloaded.offloaded.ring
    for part, other in zip(on_device.parts(), offloaded.parts(), strict=True):
        names = [parameter.name for parameter in part.parameters]
        assert names == [parameter.name for parameter in other.parameters]
        for layer in {int(name.split(".")[2]) for name in names if ".layers." in name}.intersection(ring.layers):
            offloaded.offloaded.memory.start(layer, ring.slot_of(layer))
        for one, same in zip(part.parameters, other.parameters, strict=True):
            assert torch.equal(one.place.contiguous().view(torch.uint8), same.place.contiguous().view(torch.uint8))


def test_layers_share_slots_and_have_host_memory_of_their_own(checkpoint: Path) -> None:
    model = load_model(checkpoint, torch.float32, CPU, offloading=offloading(4))
    assert model.offloaded is not None and model.offloaded.ring.layers == (1, 2, 3, 4)
    config = model.config
    experts = (config.n_routed_experts + config.n_shared_experts) * 3 * config.hidden_size
    assert model.offloaded.memory.host_bytes == 4 * experts * config.moe_intermediate_size * 4
    places = [
        parameter.place.data_ptr()
        for parameter in model.parameters()
        if parameter.name.endswith("experts.0.gate_proj.weight")
    ]
    assert len(set(places)) == 2 + config.draft_layers


def test_on_a_cpu_auto_offloads_nothing(checkpoint: Path) -> None:
    assert load_model(checkpoint, torch.float32, CPU, offloading=offloading("auto")).offloaded is None


def test_more_layers_than_have_experts_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.offload\.layers=5: the model has 4 layers with experts$"):
        load_model(checkpoint, torch.float32, CPU, offloading=offloading(5))


@pytest.mark.parametrize(("experts", "ranks", "layers"), [("w4a8", 2, 23), ("fp8", 4, 22), ("fp8", 8, 0)])
def test_auto_makes_deepseek_r1_fit_fewer_gpus(
    monkeypatch: pytest.MonkeyPatch, experts: str, ranks: int, layers: int
) -> None:
    config = parse_model_config({**SHAPES["r1"], "quantization_config": EXPERTS[experts]})
    exchange = Alone()
    exchange.place = Place(Layout(dp=ranks, ep=ranks))
    allocate = make_allocator(config, torch.bfloat16, CPU, "quantized", exchange).without_memory()
    monkeypatch.setattr(module, "free_bytes", lambda device, share: 141 * 10**9)
    monkeypatch.setattr(module, "virtual_memory", lambda: SimpleNamespace(available=10**12))
    sizes = {"context_tokens": 32768, "max_step_tokens": 16384, "kv_memory_fraction": 0.95}
    auto = offloading("auto", kv_dtype="float8_e4m3fn", **sizes)
    offloaded = auto.offloaded(config, allocate).offloaded
    assert (0 if offloaded is None else len(offloaded.ring.layers)) == layers


def test_experts_that_host_memory_cannot_hold_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "virtual_memory", lambda: SimpleNamespace(available=10**5))
    with pytest.raises(
        ConfigError, match=r"engine\.offload takes 0\.0 GB of host memory for the host's 1 ranks, and 0\.0 GB are free"
    ):
        load_model(checkpoint, torch.float32, CPU, offloading=offloading(4))


def test_a_layer_is_passed_when_all_parts_have_computed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, told = StepTurns(), list[str]()
    layers = OffloadedLayers([0, 1], 1, CPU, turns)
    monkeypatch.setattr(layers.ring, "begin", lambda: told.append("begins"))
    monkeypatch.setattr(layers.ring, "passed", lambda layer: told.append(f"layer {layer} is passed"))
    monkeypatch.setattr(layers.ring, "end", lambda: told.append("ends"))

    def compute(waits: Sequence[int]) -> None:
        layers.begin()
        for layer, count in enumerate(waits):
            for _ in range(count):
                turns.wait()
            told.append(f"part {turns.part}, layer {layer}")
            layers.passed(layer)
        layers.end()

    # In the first layer one part waits more often, in the second layer the other.
    turns.take([partial(compute, [2, 1]), partial(compute, [1, 3])])
    assert told == [
        "begins",
        "part 1, layer 0",
        "part 0, layer 0",
        "layer 0 is passed",
        "part 0, layer 1",
        "part 1, layer 1",
        "layer 1 is passed",
        "ends",
    ]
