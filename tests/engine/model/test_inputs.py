import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.batch import Row
from engine.model.config import ModelConfig, parse_model_config
from engine.model.context import DeviceState, ForwardContext
from engine.model.decode_inputs import pack_decode_rows, unpack_decode_rows
from engine.model.inputs import build_context, decode_context
from engine.model.prompt_forms import absorbed_is_cheaper
from engine.model.state import make_state
from engine.weights.loading import load_model
from kernels.fp8_gemm import make_workspace
from tests.support.checkpoints import GREEDY, random_prompt, tiny_checkpoint
from tools.make_checkpoint import checkpoint_config


def small_config() -> ModelConfig:
    return parse_model_config(checkpoint_config("small"))


def small_state() -> DeviceState:
    positions = torch.arange(1000, dtype=torch.float32).unsqueeze(1).to(torch.complex64)
    return DeviceState(
        rotations=positions,
        kv_pool=torch.zeros(1, 10, 64, 8),
        kv_scale=1.0,
        padding_block=9,
        drawn=torch.tensor([50, 60, 70]),
        missing=torch.tensor([0, 2, 0], dtype=torch.int32),
        thinks=torch.zeros(3, dtype=torch.bool),
        guessed=torch.tensor([[51, 52, -1], [61, 62, 63], [71, 72, 73]]),
        workspace=make_workspace(torch.device("cpu")),
    )


def context_of(rows: Sequence[Row], size: int | None = None) -> ForwardContext:
    return build_context(small_config(), rows, small_state(), size)


def row(start: int, count: int, blocks: Sequence[int], *, sampled: bool = True) -> Row:
    return Row(list(range(start, start + count)), start, blocks, GREEDY if sampled else None)


def test_tokens_go_to_their_blocks_slots() -> None:
    context = context_of([row(62, 4, [7, 3])])
    assert context.slots.tolist() == [7 * 64 + 62, 7 * 64 + 63, 3 * 64, 3 * 64 + 1]


def test_each_token_is_rotated_by_its_own_position() -> None:
    context = context_of([row(70, 1, [0, 1]), row(3, 2, [2])])
    assert context.rotations.real.flatten().tolist() == [70, 3, 4]


def test_only_the_last_token_of_sampling_rows_gets_logits() -> None:
    context = context_of([row(5, 1, [0]), row(0, 3, [1], sampled=False), row(0, 4, [2])])
    assert context.sampled is not None
    assert context.sampled.tolist() == [0, 7]


def test_leading_single_tokens_decode_together_and_prompts_expand() -> None:
    context = context_of([row(100, 1, [0, 1]), row(5, 1, [2]), row(0, 30, [3])])
    assert [(rows.first, rows.stop, rows.plan.rows) for rows in context.absorbed] == [(0, 2, 2)]
    assert [(part.first, part.stop, part.known) for part in context.expanded] == [(2, 32, None)]


def test_a_row_that_follows_another_takes_what_it_drew() -> None:
    follower = Row((), 70, [0, 1], GREEDY, follows=2)
    context = context_of([row(5, 1, [2]), follower])
    assert context.token_ids.tolist() == [5, 70]
    assert context.slots.tolist() == [2 * 64 + 5, 64 + 6]
    assert context.absorbed[0].plan.lengths.tolist() == [6, 71]


def test_neighbours_without_a_prefix_attend_in_one_call() -> None:
    context = context_of([row(0, 30, [3]), row(0, 40, [4])])
    (part,) = context.expanded
    assert (part.first, part.stop, part.plan.query_lengths) == (0, 70, (30, 40))


def test_neighbours_with_prefixes_attend_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    # Such short contexts would be cheaper in the absorbed form.
    monkeypatch.setattr("engine.model.prompt_forms.absorbed_is_cheaper", lambda *_, **__: False)
    rows = [row(70, 50, [4, 6]), row(80, 40, [1, 2]), row(0, 9, [3])]
    (joined,) = context_of(rows).expanded
    assert (joined.first, joined.stop) == (0, 99) and joined.known is not None
    assert (joined.plan.query_lengths, joined.plan.key_lengths) == ((50, 40, 9), (120, 120, 9))
    assert joined.known.tolist()[119:121] == [6 * 64 + 55, 64] and joined.known.tolist()[-1] == 3 * 64 + 8
    # No more keys are expanded at once than before.
    monkeypatch.setattr("engine.model.prompt_forms.EXPANDED_TOKENS", 239)
    assert [(part.first, part.stop) for part in context_of(rows[:2]).expanded] == [(0, 50), (50, 90)]


def test_rows_without_a_prefix_attend_to_nothing_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.prompt_forms.absorbed_is_cheaper", lambda *_, **__: False)
    rows = [row(0, 20, [4]), row(70, 50, [2, 6]), row(0, 9, [3])]
    state = dataclasses.replace(small_state(), kv_pool=torch.zeros(1, 10, 64, 8, dtype=torch.float8_e4m3fn))
    parts = build_context(small_config(), rows, state).expanded
    assert [(part.stop, part.known is None) for part in parts] == [(20, True), (70, False), (79, True)]


def test_a_chunk_of_one_token_may_follow_longer_ones() -> None:
    context = context_of([row(0, 30, [3]), row(100, 1, [0, 1])])
    assert [(rows.first, rows.stop) for rows in context.absorbed] == [(30, 31)]
    assert [(part.first, part.stop) for part in context.expanded] == [(0, 30)]


def test_blocks_beyond_the_rows_end_are_not_read() -> None:
    context = context_of([row(70, 1, [4, 6, 8])])
    assert context.absorbed[0].plan.runs == ((slice(256, 320), slice(384, 391)),)


@pytest.mark.parametrize(
    ("queries", "context", "absorbed"),
    [(1, 2, True), (1, 4000, True), (30, 4000, True), (150, 100_000, True), (180, 100_000, False), (64, 64, False)],
)
def test_short_chunks_behind_long_prefixes_are_cheaper_absorbed(queries: int, context: int, absorbed: bool) -> None:
    assert absorbed_is_cheaper(small_config(), queries=queries, context=context) == absorbed


def test_a_step_is_padded_with_tokens_of_no_row() -> None:
    context = context_of([row(5, 1, [0]), row(0, 3, [1])], size=7)
    assert context.padding == 3 and len(context.token_ids) == len(context.rotations) == 7
    assert context.slots.tolist() == [5, 64, 65, 66, *[9 * 64] * 3]
    assert context.real.tolist() == [True] * 4 + [False] * 3
    assert context.sampled is not None
    assert context.sampled.tolist() == [0, 3]
    assert [(part.first, part.stop) for part in (context.absorbed[0], context.expanded[0])] == [(0, 1), (1, 4)]


def test_tokens_whose_latents_others_have_are_real() -> None:
    context = context_of([Row([1, 2, 3], 0, [1], GREEDY, shared=2)])
    assert context.slots.tolist() == [9 * 64, 9 * 64, 66] and context.real.all()


def test_rows_that_fill_up_a_graph_are_not_real() -> None:
    state, rows = small_state(), [Row((7, 8), 100, [1, 2], GREEDY, drafts=1), Row((), 64, [5, 6], GREEDY, follows=0)]
    packed = torch.from_numpy(pack_decode_rows(rows, 4, 2, state.padding_block, drafts=1))
    context = decode_context(unpack_decode_rows(packed, 4, drafts=1).known(state), state)
    assert context.real.tolist() == [True] * 4 + [False] * 4
    # Kernels need it contiguous, even for one row.
    assert context_of(rows[:1]).real.is_contiguous()


@torch.inference_mode()
def test_tokens_that_belong_to_no_row_change_no_logit(tmp_path: Path) -> None:
    model = load_model(tiny_checkpoint(tmp_path), torch.float32, torch.device("cpu"))
    prompt = random_prompt(90)
    # One token after a prefix, a few tokens, and a whole prompt.
    steps = [[Row(prompt[:70], 0, [0, 1], GREEDY)], [Row(prompt[70:71], 70, [0, 1], GREEDY)]]
    steps.append([Row(prompt[71:75], 71, [0, 1], GREEDY), Row(prompt, 0, [2, 3], GREEDY)])
    found = []
    for size in (None, 112):
        state = make_state(model.config, model.device, blocks=4, positions=90, rows=2, kv_dtype=torch.float32)
        contexts = (build_context(model.config, rows, state, size) for rows in steps)
        found.append(torch.cat([model.forward(context) for context in contexts]))
    assert found[0].shape[0] == 4
    assert torch.allclose(found[0], found[1], atol=1e-4)


def test_a_following_row_begins_where_the_row_before_ended() -> None:
    rows = [
        Row((), 100, [1, 2], GREEDY, follows=1, drafts=1),
        Row((), 100, [3, 4], GREEDY, follows=2, drafts=2),
        Row((), 64, [5, 6], GREEDY, follows=0, drafts=2),
    ]
    context = context_of(rows)
    assert context.token_ids.tolist() == [60, 61, 70, 71, 72, 50, 51, 52]
    assert context.rotations.flatten().real.tolist() == [98, 99, 100, 101, 102, 64, 65, 66]
    slots = [2 * 64 + 34, 2 * 64 + 35, *range(4 * 64 + 36, 4 * 64 + 39), *range(6 * 64, 6 * 64 + 3)]
    assert context.slots.tolist() == slots
    spans = [(each.first, each.stop, each.plan.query_tokens) for each in context.absorbed]
    assert spans == [(0, 2, 2), (2, 8, 3)]
    assert [each.plan.lengths.tolist() for each in context.absorbed] == [[100], [103, 67]]
