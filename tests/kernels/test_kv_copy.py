from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.kv_copy import BLOCK_TOKENS, read_latents, slot_runs, write_latents

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


def test_what_is_written_is_read_and_nothing_else_changes() -> None:
    pool = torch.full((6, BLOCK_TOKENS, 12), float("nan"))
    latents = torch.randn(100, 12)
    runs = slot_runs([4, 1], 100)
    slots = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    write_latents(latents, slots, pool)
    assert torch.equal(read_latents(pool, runs, torch.float32), latents)
    assert pool.isnan().sum() == (6 * BLOCK_TOKENS - 100) * 12


def test_contiguous_blocks_are_read_without_a_copy() -> None:
    pool = torch.randn(6, BLOCK_TOKENS, 12)
    found = read_latents(pool, slot_runs([2, 3, 4], 150), torch.float32)
    assert found.data_ptr() == pool[2].data_ptr() and torch.equal(found, pool[2:5].flatten(0, 1)[:150])


def test_a_compressed_pool_keeps_three_bits_of_mantissa_and_its_range() -> None:
    pool = torch.zeros(3, BLOCK_TOKENS, 12, dtype=torch.float8_e4m3fn)
    latents = torch.randn(100, 12)
    latents[7] = 1e6
    runs = slot_runs([2, 0], 100)
    write_latents(latents, torch.cat([torch.arange(run.start, run.stop) for run in runs]), pool)
    found = read_latents(pool, runs, torch.float32)
    assert torch.equal(found[7], torch.full((12,), 448.0)), "clamped, not infinite"
    error = (found - latents).abs()[torch.arange(100) != 7]
    # Half of the last of three bits, or of the smallest step.
    assert (error <= latents.abs()[torch.arange(100) != 7].mul(2**-4).clamp(min=2**-10)).all()
    assert not pool[1].float().any()


def test_writing_no_tokens_changes_nothing() -> None:
    pool = torch.zeros(2, BLOCK_TOKENS, 12)
    write_latents(torch.empty(0, 12), torch.empty(0, dtype=torch.int64), pool)
    assert not pool.any()
