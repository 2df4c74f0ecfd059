from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.act_quant import dequantize
from kernels.kv_copy import BLOCK_TOKENS, place_latents, read_latents, read_quantized, slot_runs

block_ids = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)


@given(block_ids, st.data())
def test_runs_are_the_slots_of_the_tokens_in_order(blocks: list[int], data: st.DataObject) -> None:
    tokens = data.draw(st.integers(0, len(blocks) * BLOCK_TOKENS))
    slots = [slot for run in slot_runs(blocks, tokens) for slot in range(run.start, run.stop)]
    assert slots == [blocks[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS for token in range(tokens)]


@given(block_ids, st.data())
def test_neighbouring_runs_never_touch(blocks: list[int], data: st.DataObject) -> None:
    runs = slot_runs(blocks, data.draw(st.integers(1, len(blocks) * BLOCK_TOKENS)))
    assert all(first.stop != second.start for first, second in pairwise(runs))


def test_latents_are_read_in_the_order_of_their_slots() -> None:
    pool = torch.randn(6, BLOCK_TOKENS, 12)
    slots = torch.randperm(6 * BLOCK_TOKENS)[:100]
    assert torch.equal(read_latents(pool, slots, torch.float32), pool.view(-1, 12)[slots])


def test_a_compressed_latent_is_scale_times_what_is_stored() -> None:
    pool = torch.randn(3, BLOCK_TOKENS, 12).to(torch.float8_e4m3fn)
    slots = torch.randperm(3 * BLOCK_TOKENS)[:50]
    assert torch.equal(read_latents(pool, slots, torch.float32, 0.25), pool.float().view(-1, 12)[slots] * 0.25)


def test_latents_are_rounded_and_clamped_where_e4m3_is_asked_for() -> None:
    pool = torch.randn(3, BLOCK_TOKENS, 12) * 200
    slots = torch.randperm(3 * BLOCK_TOKENS)[:50]
    found = read_latents(pool, slots, torch.float8_e4m3fn)
    assert torch.equal(found.float(), pool.view(-1, 12)[slots].clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert found.float().abs().max() == 448


def test_compressed_latents_stay_as_they_are_stored() -> None:
    pool = torch.randn(3, BLOCK_TOKENS, 140).to(torch.float8_e4m3fn)
    slots = torch.randperm(3 * BLOCK_TOKENS)[:50]
    found, rest = read_quantized(pool, slots, torch.float32, 0.25, width=128)
    expected = read_latents(pool, slots, torch.float32, 0.25)
    assert torch.equal(dequantize(found), expected[:, :128]) and torch.equal(rest, expected[:, 128:])


def test_latents_are_placed_in_order() -> None:
    pool, latents = torch.zeros(2, BLOCK_TOKENS, 12), torch.randn(5, 12)
    place_latents(latents, torch.tensor([3, 0, 4]), pool, torch.tensor([70, 2, 65]))
    placed = pool.view(-1, 12)
    assert torch.equal(placed[[70, 2, 65]], latents[[3, 0, 4]]) and placed.count_nonzero(dim=1).count_nonzero() == 3
