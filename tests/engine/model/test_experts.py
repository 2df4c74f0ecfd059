"""Shared experts in the routed experts' grouped products, and as a layer of their own, as they are published."""

from dataclasses import replace

import pytest
import torch

from engine.exchange.alone import Alone
from engine.model import moe
from engine.model.activations import Normalized, Sent
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig, parse_model_config
from engine.model.formats.choice import choose_formats
from engine.model.moe import MixtureOfExperts
from engine.model.parameters import NamedParameters, merged_shape
from engine.weights.random_weights import fill_randomly
from kernels.act_quant import quantize
from kernels.fp8_gemm import make_workspace
from kernels.moe_permute import NOWHERE, ExpertOutputs, combine
from kernels.norm import Delta
from tests.support.errors import relative_error
from tools.make_checkpoint import checkpoint_config

CPU = torch.device("cpu")


def config_with(shared: int, dtype: str) -> ModelConfig:
    overrides = {"n_shared_experts": shared, "moe_intermediate_size": 128}
    return parse_model_config(checkpoint_config("tiny", dtype=dtype, overrides=overrides))


def mixture_of(
    config: ModelConfig, dtype: torch.dtype, *, shared_apart: bool, device: torch.device = CPU
) -> MixtureOfExperts:
    formats = choose_formats(config.quantization, dtype, dequantize=False)
    return MixtureOfExperts(config, 0, Allocator(dtype, device, replace(formats, shared_apart=shared_apart)))


def fill(target: NamedParameters, source: NamedParameters) -> None:
    """Copies published tensors from one module's places to another's."""
    published = {each.name: each.place.reshape(merged_shape(each.place)) for each in source}
    for parameter in target:
        parameter.place.copy_(published.pop(parameter.name).view(parameter.place.shape))
    assert not published


def summed(delta: Delta) -> torch.Tensor:
    return combine(delta) if isinstance(delta, ExpertOutputs) else delta


@pytest.mark.parametrize("tokens", [0, 1, 50, 400])
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "FP8"])
def test_shared_experts_add_the_same_joined_and_apart(tokens: int, shared: int, fp8: bool) -> None:
    # Few tokens and many: both layouts of FP8 experts.
    config, dtype = config_with(shared, "float8" if fp8 else "float32"), torch.bfloat16 if fp8 else torch.float32
    joined, apart = (mixture_of(config, dtype, shared_apart=each) for each in (False, True))
    fill_randomly(joined.parameters("mlp"), CPU)
    fill(apart.parameters("mlp"), joined.parameters("mlp"))
    plain = torch.randn(tokens, config.hidden_size).to(dtype)
    hidden, workspace = Normalized(plain, quantize(plain) if fp8 else None), make_workspace(CPU)
    together, separate = (mixture.forward(hidden, workspace) for mixture in (joined, apart))
    assert relative_error(summed(together), summed(separate)) < (1e-2 if fp8 else 1e-5)


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("shared_apart", [False, True], ids=["joined", "apart"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "FP8"])
@pytest.mark.parametrize("tokens", [5, 600])
def test_padding_goes_to_no_expert(
    tokens: int, fp8: bool, shared_apart: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(1, "float8" if fp8 else "float32")
    dtype = torch.bfloat16 if fp8 or device.type == "cuda" else torch.float32
    mixture = mixture_of(config, dtype, shared_apart=shared_apart, device=device)
    # On a CPU only ranks that divide experts pad steps.
    monkeypatch.setattr(mixture, "_skips_padding", True)
    fill_randomly(mixture.parameters("mlp"), device)
    plain = torch.randn(tokens, config.hidden_size).to(device, dtype)
    counted = torch.arange(tokens, device=device) % 3 != 1
    # What padding holds must not matter.
    plain[~counted] = float("nan")
    hidden, real = (Normalized(each, quantize(each) if fp8 else None) for each in (plain, plain[counted]))
    workspace = make_workspace(device)
    found, expected = (mixture.forward(rows, workspace, mask) for rows, mask in ((hidden, counted), (real, None)))
    assert relative_error(summed(found)[counted], summed(expected)) < (1e-5 if dtype == torch.float32 else 1e-2)
    outputs = mixture.routed(hidden, counted)
    assert (outputs.positions[~counted] == NOWHERE).all() and (outputs.positions[counted] != NOWHERE).all()


@pytest.mark.parametrize("shared_apart", [False, True], ids=["joined", "apart"])
@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "FP8"])
def test_tokens_in_chunks_add_the_same_as_all_at_once(
    shared_apart: bool, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, dtype = config_with(1, "float8" if fp8 else "float32"), torch.bfloat16 if fp8 else torch.float32
    mixture = mixture_of(config, dtype, shared_apart=shared_apart)
    fill_randomly(mixture.parameters("mlp"), CPU)
    plain = torch.randn(50, config.hidden_size).to(dtype)
    hidden, workspace = Normalized(plain, quantize(plain) if fp8 else None), make_workspace(CPU)
    expected = summed(mixture.forward(hidden, workspace))
    monkeypatch.setattr(moe, "CHUNK_TOKENS", 16)
    assert relative_error(summed(mixture.forward(hidden, workspace)), expected) < (1e-2 if fp8 else 1e-5)


def test_chunks_are_few_and_about_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_with(1, "float32")
    mixture = mixture_of(config, torch.float32, shared_apart=False)
    fill_randomly(mixture.parameters("mlp"), CPU)
    seen, compute = [], mixture.experts.forward

    def forward(hidden: Sent, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(choices))
        return compute(hidden, choices)

    monkeypatch.setattr(mixture.experts, "forward", forward)
    monkeypatch.setattr(moe, "CHUNK_TOKENS", 32)
    mixture.forward(Normalized(torch.randn(68, config.hidden_size), None), make_workspace(CPU))
    assert seen == [24, 24, 20]


@pytest.mark.parametrize(
    ("overlaps", "order"),
    [(False, "send compute send compute send compute"), (True, "send send compute send compute compute")],
    ids=["one host", "several hosts"],
)
def test_the_next_chunk_is_sent_ahead_if_it_travels_meanwhile(
    overlaps: bool, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, exchange, seen = config_with(1, "float32"), Alone(), list[str]()
    monkeypatch.setattr(exchange, "overlaps", overlaps)
    formats = choose_formats(config.quantization, torch.float32, dequantize=False)
    mixture = MixtureOfExperts(config, 0, Allocator(torch.float32, CPU, formats, exchange))
    fill_randomly(mixture.parameters("mlp"), CPU)
    choose, compute = mixture.gate.choose, mixture.experts.forward

    def send(hidden: Normalized, counted: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append("send")
        return choose(hidden, counted)

    def forward(hidden: Sent, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append("compute")
        return compute(hidden, choices)

    monkeypatch.setattr(mixture.gate, "choose", send)
    monkeypatch.setattr(mixture.experts, "forward", forward)
    monkeypatch.setattr(moe, "CHUNK_TOKENS", 32)
    mixture.forward(Normalized(torch.randn(68, config.hidden_size), None), make_workspace(CPU))
    assert " ".join(seen) == order


# DeepSeek-V2's 160 experts can be divided by 20 and 40, but 16,384 tokens cannot.
@pytest.mark.parametrize("ranks", [1, 8, 20, 40])
def test_no_chunk_has_more_tokens_than_there_is_room_for(ranks: int) -> None:
    most = moe.chunk_tokens(ranks)
    for tokens in range(most + 1, 4 * most, 61):
        chunks = moe._chunks(tokens, most)
        assert max(chunk.stop - chunk.start for chunk in chunks) <= most
        assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks[:-1])]
        assert chunks[-1].stop == tokens


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 50])
def test_shared_experts_on_a_side_stream_add_the_same(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, device = config_with(1, "float8"), torch.device("cuda")
    mixture = mixture_of(config, torch.bfloat16, shared_apart=True, device=device)
    fill_randomly(mixture.parameters("mlp"), device)
    plain = torch.empty(tokens, config.hidden_size, dtype=torch.bfloat16, device=device)
    # As on the side stream: other kernels multiply where no other stream needs multiprocessors, and round otherwise.
    workspace = make_workspace(device, shares_chip=True)

    def forward() -> torch.Tensor:
        return summed(mixture.forward(Normalized(plain, quantize(plain)), workspace))

    plain.normal_()
    # Compiles what is captured below.
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    for _ in range(20):
        plain.normal_()
        graph.replay()
        eager = forward()
        with monkeypatch.context() as patch:
            patch.setattr(moe, "ASIDE_TOKENS", 0)
            assert torch.equal(captured, forward())
        assert torch.equal(captured, eager)


def test_experts_of_one_format_are_computed_together() -> None:
    for dtype in ("float8", "bfloat16"):
        stored = config_with(1, dtype).quantization
        assert not choose_formats(stored, torch.bfloat16, dequantize=False).shared_apart
