"""A model divided over the ranks of a TP group against the same model whole."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Row
from engine.exchange.host import HostExchange
from engine.model.activations import Sent
from engine.model.formats.plain import PlainExperts
from engine.model.inputs import build_context
from engine.model.model import Model
from engine.model.parameters import Parameter, merged_shape
from engine.model.quantization import KeptWeights
from engine.model.share import check_division
from engine.model.state import make_state
from engine.model.tensor_group import FEW_ROWS
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.weights import reader
from engine.weights.loading import load_model
from engine.weights.shards import Shards, open_shards
from kernels.moe_gate import NO_EXPERT
from mesh.errors import ConfigError
from tests.support.checkpoints import GREEDY, random_prompt, tiny_checkpoint
from tests.support.errors import relative_error
from tests.support.nvfp4 import WITH_OUTPUT, nvfp4_checkpoint
from tests.support.rank_threads import on_each_rank

CPU = torch.device("cpu")
BLOCKS = 4
# More rows than a step may have for every rank to compute all of them.
MANY_ROWS = FEW_ROWS + 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def fp8_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Queries of two heads, and values of two heads, are whole blocks of 128."""
    return tiny_checkpoint(
        tmp_path_factory.mktemp("fp8"),
        dtype="float8",
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
        intermediate_size=256,
    )


@pytest.fixture(scope="module")
def fp4_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that can be in NVFP4 is, and one head's queries and values are whole blocks of 128. Every expert is chosen,
    because a different choice would change more than rounding does.
    """
    return nvfp4_checkpoint(
        tmp_path_factory.mktemp("nvfp4"),
        quantized=WITH_OUTPUT,
        num_nextn_predict_layers=0,
        qk_nope_head_dim=96,
        qk_rope_head_dim=32,
        v_head_dim=128,
        intermediate_size=512,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
    )


@torch.inference_mode()
def computed(model: Model, prompt: list[int], chunks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every token of a prompt that is computed in chunks, and the KV pool after them."""
    state = make_state(model.config, CPU, blocks=BLOCKS, positions=len(prompt), rows=1, kv_dtype=model.dtype)
    logits, start = [], 0
    for size in chunks:
        row = Row(prompt[start : start + size], start, range(BLOCKS), GREEDY)
        logits.append(model.forward(dataclasses.replace(build_context(model.config, [row], state), sampled=None)))
        start += size
    return torch.cat(logits), state.kv_pool


@pytest.mark.parametrize("tp", [2, 4])
def test_each_rank_of_a_tp_group_computes_one_ranks_logits(checkpoint: Path, tp: int) -> None:
    # A first chunk, chunks with fewer rows than ranks, and one with rows that the ranks cannot divide evenly.
    prompt, chunks = random_prompt(110), [65, 1, 2, 3, 39]
    expected, _ = computed(load_model(checkpoint, torch.float32, CPU), prompt, chunks)

    def compute(peers: Peers) -> torch.Tensor:
        return computed(load_model(checkpoint, torch.float32, CPU, exchange=HostExchange(peers)), prompt, chunks)[0]

    for logits in on_each_rank(Layout(tp=tp, ep=tp), compute):
        assert relative_error(logits, expected) < 1e-5


@pytest.mark.parametrize("rows", [1, 3, MANY_ROWS])
def test_ranks_divide_shared_experts_for_few_rows(tmp_path: Path, rows: int) -> None:
    # Each rank's part of the width is a whole block.
    checkpoint, prompt = tiny_checkpoint(tmp_path, moe_intermediate_size=512), random_prompt(rows)
    expected, _ = computed(load_model(checkpoint, torch.float32, CPU), prompt, [rows])

    def compute(peers: Peers) -> tuple[torch.Tensor, set[int]]:
        model = load_model(checkpoint, torch.float32, CPU, exchange=HostExchange(peers))
        shared = [each for each in model.parameters() if "shared_experts.down_proj" in each.name]
        return computed(model, prompt, [rows])[0], {each.place.shape[1] for each in shared}

    for logits, widths in on_each_rank(Layout(tp=4, ep=4), compute):
        assert relative_error(logits, expected) < 1e-5
        assert widths == {512, 128}


@torch.inference_mode()
def drafted(model: Model, prompt: list[int]) -> torch.Tensor:
    """The MTP module's hidden state of each token: [tokens, hidden]."""
    state = make_state(model.config, CPU, blocks=BLOCKS, positions=len(prompt), rows=1, kv_dtype=model.dtype)
    context = build_context(model.config, [Row(prompt, 0, range(BLOCKS), GREEDY)], state)
    return model.draft(0, model.hidden_states(context), context)


@pytest.mark.parametrize("tokens", [1, 7, MANY_ROWS])
def test_every_rank_of_a_tp_group_drafts_as_one_rank(tmp_path: Path, tokens: int) -> None:
    checkpoint, prompt = tiny_checkpoint(tmp_path, num_nextn_predict_layers=1), random_prompt(tokens)
    expected = drafted(load_model(checkpoint, torch.float32, CPU, drafts=1), prompt)

    def compute(peers: Peers) -> tuple[torch.Tensor, int]:
        model = load_model(checkpoint, torch.float32, CPU, drafts=1, exchange=HostExchange(peers))
        (merge,) = (each for each in model.parameters() if "eh_proj" in each.name)
        return drafted(model, prompt), merge.place.shape[1]

    for states, inputs in on_each_rank(Layout(tp=4, ep=4), compute):
        assert relative_error(states, expected) < 1e-5
        assert inputs * 4 == 2 * expected.shape[1]


def test_rows_that_a_rank_lacks_go_to_no_expert(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    forward = PlainExperts.forward

    def record(experts: PlainExperts, hidden: Sent, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(choices)
        return forward(experts, hidden, choices)

    monkeypatch.setattr(PlainExperts, "forward", record)

    def compute(peers: Peers) -> None:
        model = load_model(checkpoint, torch.float32, CPU, exchange=HostExchange(peers))
        computed(model, random_prompt(MANY_ROWS), [MANY_ROWS])

    on_each_rank(Layout(tp=4, ep=4), compute)
    # Each rank has nine rows: three of the last one's are padding.
    assert seen and all(len(choices) == MANY_ROWS + 3 for choices in seen)
    for choices in seen:
        assert (choices[:MANY_ROWS] != NO_EXPERT).all() and (choices[MANY_ROWS:] == NO_EXPERT).all()


@pytest.mark.parametrize(("rows", "sums", "gathers"), [(FEW_ROWS, 2, 0), (MANY_ROWS, 2, 2)])
def test_few_rows_are_exchanged_in_two_sums_a_layer(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rows: int, sums: int, gathers: int
) -> None:
    """The first layer is dense. Outside the layers, ranks exchange a sum of embeddings or one after the last layer, and
    gather the logits' columns.
    """
    calls: list[str] = []

    def compute(peers: Peers) -> int:
        exchange = HostExchange(peers)
        model = load_model(checkpoint, torch.float32, CPU, exchange=exchange)
        if peers.place.leads:
            for name in ("all_reduce", "begin_reduce_scatter", "all_gather", "begin_all_gather"):
                monkeypatch.setattr(exchange, name, recording(name, getattr(exchange, name)))
        computed(model, random_prompt(rows), [rows])
        return len(model.layers)

    def recording(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any, **more: Any) -> Any:
            calls.append(name)
            return call(*given, **more)

        return made

    layers = on_each_rank(Layout(tp=2, ep=2), compute)[0]
    summed = [call for call in calls if call in ("all_reduce", "begin_reduce_scatter")]
    assert len(summed) == sums * layers + 1
    assert len(calls) - len(summed) == gathers * layers + 1 + (1 if gathers else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_of_a_tp_group_write_equal_latents(checkpoint: Path, dtype: torch.dtype) -> None:
    prompt = random_prompt(110)

    def compute(peers: Peers) -> torch.Tensor:
        return computed(load_model(checkpoint, dtype, CPU, exchange=HostExchange(peers)), prompt, [97, 1, 1, 11])[1]

    first, *others = on_each_rank(Layout(tp=4, ep=4), compute)
    assert first.abs().sum() > 0
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_of_a_tp_group_divide_the_weights(checkpoint: Path, tp: int) -> None:
    assert_shares(checkpoint, torch.float32, "dequantized", tp)


@pytest.mark.parametrize("weights", ["dequantized", "quantized"])
def test_shares_of_fp8_weights_consist_of_their_blocks(fp8_checkpoint: Path, weights: KeptWeights) -> None:
    assert_shares(fp8_checkpoint, torch.bfloat16, weights, 2)


def test_fp8_weights_divided_are_as_exact_as_whole(fp8_checkpoint: Path) -> None:
    prompt, chunks = random_prompt(70), [69, 1]
    exact, _ = computed(load_model(fp8_checkpoint, torch.float32, CPU), prompt, chunks)
    alone, _ = computed(load_model(fp8_checkpoint, torch.bfloat16, CPU, "quantized"), prompt, chunks)

    def compute(peers: Peers) -> torch.Tensor:
        model = load_model(fp8_checkpoint, torch.bfloat16, CPU, "quantized", exchange=HostExchange(peers))
        return computed(model, prompt, chunks)[0]

    for logits in on_each_rank(Layout(tp=2, ep=2), compute):
        assert relative_error(logits, exact) < 1.2 * relative_error(alone, exact)


@pytest.mark.parametrize("weights", ["dequantized", "quantized"])
def test_shares_of_nvfp4_weights_consist_of_their_groups(fp4_checkpoint: Path, weights: KeptWeights) -> None:
    assert_shares(fp4_checkpoint, torch.bfloat16, weights, 4)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_group_over_nvfp4_weights_computes_what_one_rank_does(fp4_checkpoint: Path, tp: int) -> None:
    prompt, chunks = random_prompt(70), [69, 1]
    exact, _ = computed(load_model(fp4_checkpoint, torch.float32, CPU), prompt, chunks)
    alone, _ = computed(load_model(fp4_checkpoint, torch.bfloat16, CPU, "quantized"), prompt, chunks)

    def compute(peers: Peers, dtype: torch.dtype, weights: KeptWeights) -> torch.Tensor:
        model = load_model(fp4_checkpoint, dtype, CPU, weights, exchange=HostExchange(peers))
        return computed(model, prompt, chunks)[0]

    layout = Layout(tp=tp, ep=tp)
    for logits in on_each_rank(layout, lambda peers: compute(peers, torch.float32, "dequantized")):
        assert relative_error(logits, exact) < 1e-5
    # Both round to bfloat16, but add in different orders.
    for logits in on_each_rank(layout, lambda peers: compute(peers, torch.bfloat16, "quantized")):
        assert relative_error(logits, exact) < 1.5 * relative_error(alone, exact)


def test_a_rank_reads_the_rows_of_its_share_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_shards(checkpoint) as shards:
        entries = list(shards.entries.values())
    read: list[tuple[str, int]] = []

    def count(shards: Shards, path: Path, offset: int, target: memoryview) -> None:
        (name,) = [each.name for each in entries if each.path == path and 0 <= offset - each.offset < each.size_bytes]
        read.append((name, len(target)))

    # Read each tensor by itself.
    monkeypatch.setattr(reader, "WINDOW_BYTES", 1)
    monkeypatch.setattr(Shards, "read", count)
    load_model(checkpoint, torch.float32, CPU)
    whole = dict(read)
    read.clear()
    on_each_rank(
        Layout(tp=2, ep=2), lambda peers: load_model(checkpoint, torch.float32, CPU, exchange=HostExchange(peers))
    )
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.kv_b_proj.weight"):
        assert [size for found, size in read if found == name] == [whole[name] // 2] * 2


def assert_shares(directory: Path, dtype: torch.dtype, weights: KeptWeights, tp: int) -> None:
    """Assert that every place holds the part of the whole model's tensor that it claims, and that most tensors are
    cut.
    """
    expected = {each.name: each for each in load_model(directory, dtype, CPU, weights).parameters()}

    def load(peers: Peers) -> list[Parameter]:
        return list(load_model(directory, dtype, CPU, weights, exchange=HostExchange(peers)).parameters())

    cut = 0
    ranks = on_each_rank(Layout(tp=tp, ep=tp), load)
    assert {each.name for rank in ranks for each in rank} == expected.keys()
    for rank in ranks:
        for each in rank:
            assert each.shape == expected[each.name].shape
            assert torch.equal(matrix(each).float(), matrix(expected[each.name]).float()[each.slices])
            cut += each.part_shape != each.shape
    # Each layer divides queries, keys and values, and output; the dense one gate, up and down; vocabulary twice.
    assert cut >= tp * (3 * 3 + 3 + 2)


def matrix(parameter: Parameter) -> torch.Tensor:
    return parameter.place.reshape(merged_shape(parameter.place))


@pytest.mark.parametrize(
    ("tp", "overrides", "cause"),
    [
        (3, {}, "does not divide the model's 4 attention heads"),
        (4, {"vocab_size": 322}, "does not divide the model's vocabulary of 322"),
        (4, {"intermediate_size": 98}, "does not divide the model's dense layers' width of 98"),
        (4, {"hidden_size": 66, "num_nextn_predict_layers": 1}, "does not divide the model's hidden size of 66"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(
    tmp_path: Path, tp: int, overrides: dict[str, Any], cause: str
) -> None:
    drafts = overrides.get("num_nextn_predict_layers", 0)
    config = load_model(tiny_checkpoint(tmp_path, **overrides), torch.float32, CPU, drafts=drafts).config
    with pytest.raises(ConfigError, match=f"engine.parallel.tp={tp} {cause}"):
        check_division(config, tp, blocks=False)


def test_a_cut_within_a_block_of_fp8_weights_is_refused(fp8_checkpoint: Path) -> None:
    config = load_model(fp8_checkpoint, torch.bfloat16, CPU).config
    check_division(config, 4, blocks=False)
    with pytest.raises(ConfigError, match="cuts the quantized weights of the queries"):
        check_division(config, 4, blocks=True)
