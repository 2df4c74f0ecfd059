"""Steps computed in two micro-batches that take turns against the same steps whole."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.balance.config import BalanceConfig
from engine.batch import Row
from engine.exchange.host import HostExchange
from engine.model import moe
from engine.model.context import DeviceState
from engine.model.inputs import build_context
from engine.model.model import Model
from engine.model.state import make_state
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.runner import step_parts
from engine.runner.micro_batches import MicroBatches
from engine.step.shape import StepShape, shape_of
from engine.step.two_batch import ALWAYS, NEVER, TwoBatch
from engine.weights.loading import load_model
from tests.support.checkpoints import GREEDY, random_prompt, tiny_checkpoint
from tests.support.errors import relative_error
from tests.support.rank_threads import on_each_rank

CPU = torch.device("cpu")
TOKENS = random_prompt(150)
# Steps by DP rank, in which each rank has more rows than the others in one step and fewer in the next. There are
# prompts whole and in chunks, rows that decode in the same step, and a step without any row.
STEPS = [
    [[Row(TOKENS[:70], 0, [0, 1], GREEDY), Row(TOKENS[:9], 0, [3], GREEDY)], [Row(TOKENS[:4], 0, [0], GREEDY)]],
    [
        [Row(TOKENS[9:10], 9, [3], GREEDY)],
        [Row(TOKENS[4:5], 4, [0], GREEDY), Row(TOKENS[:81], 0, [1, 2], None)],
    ],
    [[Row(TOKENS[10:11], 10, [3], GREEDY), Row(TOKENS[70:145], 70, [0, 1, 2], GREEDY)], []],
]


class Computed:
    """The results of a rank's steps."""

    def __init__(self, model: Model, two_batch: TwoBatch, dp_index: int) -> None:
        self.state = make_state(model.config, CPU, blocks=4, positions=150, rows=2, kv_dtype=torch.float32)
        self.logits: list[torch.Tensor] = []
        self.missing: list[int] = []
        self.reported: list[int] = []
        batches = MicroBatches(two_batch, lambda tokens: tokens)
        layers = model.balanced_layers().values()
        chosen_before = torch.stack([layer.slots.chosen for layer in layers])
        for rows_by_rank in STEPS:
            shape = StepShape(max(shape_of(rows).tokens for rows in rows_by_rank))
            self._step(model, batches, rows_by_rank[dp_index], shape)
        self.chosen = torch.stack([layer.slots.chosen for layer in layers]) - chosen_before

    def _step(self, model: Model, batches: MicroBatches, rows: Sequence[Row], shape: StepShape) -> None:
        parts = [build_context(model.config, each.rows, self.state, each.size) for each in batches.of(rows, shape)]
        own = [slot for row in rows for slot in slots_of(row)]

        def on_layers(count: int) -> None:
            self.reported.append(count)
            self.missing.append(int((flat(self.state)[:count, own] == 0).all(2).sum()))

        self.logits.append(step_parts.logits(model, parts, on_layers))


def slots_of(row: Row) -> list[int]:
    return [row.block_ids[position // 64] * 64 + position % 64 for position in range(row.start, row.end)]


def flat(state: DeviceState) -> torch.Tensor:
    """[layers, slots, latent] of the blocks that are not padding."""
    return state.kv_pool[:, :4].flatten(1, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("chunk_tokens", [8192, 64])
@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(tp=2, dp=2, ep=4)], ids=str)
def test_two_micro_batches_compute_what_one_does(
    checkpoint: Path, layout: Layout, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """chunk_tokens: experts compute few tokens at once, or all."""
    balance = BalanceConfig(interval_steps=16, redundant=0)

    def compute(peers: Peers) -> tuple[Computed, Computed]:
        exchange = HostExchange(peers)
        model = load_model(checkpoint, torch.float32, CPU, exchange=exchange, balance=balance)
        with torch.inference_mode():
            one, two = (Computed(model, each, peers.place.dp_index) for each in (NEVER, ALWAYS))
        return one, two

    monkeypatch.setattr(moe, "CHUNK_TOKENS", chunk_tokens)
    ranks = on_each_rank(layout, compute, 60.0)
    for one, two in ranks:
        for found, expected in zip(two.logits, one.logits, strict=True):
            assert found.shape == expected.shape and (not len(found) or relative_error(found, expected) < 1e-5)
        assert relative_error(flat(two.state), flat(one.state)) < 1e-5
        layers = list(range(1, 1 + max(one.reported)))
        assert two.reported == one.reported == layers * len(STEPS)
        assert not any(two.missing) and not any(one.missing)
    # The ranks of a TP group divide the rows of each micro-batch.
    whole, halved = (sum(both[way].chosen for both in ranks) for way in (0, 1))
    assert torch.equal(torch.as_tensor(halved), torch.as_tensor(whole)) and torch.as_tensor(whole).sum() > 0


def test_a_half_with_fewer_chunks_waits_for_earlier_keys(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half has 33 of 65 tokens, in two chunks; the second has 32 in one chunk, which attend to the first
    half.
    """

    def compute(peers: Peers) -> tuple[torch.Tensor, torch.Tensor]:
        model = load_model(checkpoint, torch.float32, CPU, exchange=HostExchange(peers))
        state = make_state(model.config, CPU, blocks=4, positions=150, rows=2, kv_dtype=torch.float32)
        rows = [Row(TOKENS[:65], 0, [0, 1], GREEDY)]
        logits = []
        for two_batch in (NEVER, ALWAYS):
            # Keys of the last step must not stand in for those that are missing.
            state.kv_pool.zero_()
            parts = MicroBatches(two_batch, lambda tokens: tokens).of(rows, shape_of(rows))
            with torch.inference_mode():
                contexts = [build_context(model.config, each.rows, state, each.size) for each in parts]
                logits.append(step_parts.logits(model, contexts))
        return logits[0], logits[1]

    monkeypatch.setattr(moe, "CHUNK_TOKENS", 64)
    for one, two in on_each_rank(Layout(dp=2, ep=2), compute, 60.0):
        assert relative_error(two, one) < 1e-5
