from itertools import pairwise, product
from typing import NamedTuple

import pytest
import torch

from kernels.mla_prefill import merge_attention, mla_prefill, plan_prefill
from kernels.sparse_prefill import (
    Selection,
    attention_log_sums,
    kept_blocks,
    line_masses,
    reference,
    select_lines,
    sparse_prefill,
    triton_blocks,
)
from kernels.sparse_prefill import triton as triton_sparse
from kernels.sparse_prefill.triton_blocks import list_blocks

CPU = torch.device("cpu")
SCALE = 0.3
HEADS = 3
# Queries and keys of a prompt: its last queries, behind a cached prefix or not, around the bounds of tiles and blocks.
SHAPES = [(1, 1), (1, 130), (63, 63), (64, 64), (70, 135), (129, 129), (130, 500), (257, 257), (300, 811)]
shapes = pytest.mark.parametrize(("queries", "keys"), SHAPES)


class Prompt(NamedTuple):
    """What `mla_prefill` takes: both parts of the keys, each head's own and the shared one."""

    query: torch.Tensor
    own: torch.Tensor
    shared: torch.Tensor
    value: torch.Tensor

    @property
    def keys(self) -> int:
        return len(self.own)

    @property
    def key(self) -> torch.Tensor:
        return torch.cat([self.own, self.shared.unsqueeze(1).expand(-1, self.own.shape[1], -1)], dim=2)

    def between(self, begin: int, end: int) -> "Prompt":
        """With some of the keys."""
        return Prompt(self.query, *(part[begin:end] for part in self[1:]))


def prompt(queries: int, keys: int) -> Prompt:
    parts = torch.randn(keys, HEADS, 16), torch.randn(keys, 8), torch.randn(keys, HEADS, 16)
    return Prompt(torch.randn(queries, HEADS, 24), *parts)


def random_selection(keys: int, share: float = 0.3) -> Selection:
    columns, slashes = torch.rand(2, HEADS, -(-keys // 64)) < share
    columns[:, 0] = slashes[:, :2] = True
    return Selection(columns, slashes)


def dense(given: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    return mla_prefill(*given, plan_prefill([len(given.query)], [given.keys], CPU), scale=SCALE)


def sparse(given: Prompt, selected: Selection) -> tuple[torch.Tensor, torch.Tensor]:
    return sparse_prefill(*given, selected, first_query=given.keys - len(given.query), first_key=0, scale=SCALE)


def last_weights(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[heads, queries, keys] in float64."""
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.expand(-1, query.shape[1], -1).double()) * SCALE
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(key.shape[0] - query.shape[0] + 1)
    return scores.masked_fill(hidden, float("-inf")).softmax(2)


@shapes
def test_everything_selected_is_dense_attention(queries: int, keys: int) -> None:
    given = prompt(queries, keys)
    expected, expected_log_sum = dense(given)
    found, log_sum = sparse(given, random_selection(keys, share=2))
    assert (found - expected).norm() / expected.norm() < 1e-6
    assert torch.allclose(log_sum, expected_log_sum, atol=1e-5)


@shapes
def test_a_query_attends_to_selected_columns_and_slashes(queries: int, keys: int) -> None:
    """Token by token: whatever line of one key or one distance is selected is seen, whole blocks beside it."""
    selected, first = random_selection(keys), keys - queries
    kept = kept_blocks(selected, queries, keys, first_query=first, first_key=0)
    for tile, start in enumerate(range(0, queries, 128)):
        positions = torch.arange(first + start, min(first + start + 128, keys)).unsqueeze(1)
        distance = positions - torch.arange(keys)
        wanted = selected.columns[:, torch.arange(keys) // 64].unsqueeze(1)
        wanted = (wanted | selected.slashes[:, distance.clamp(min=0) // 64]) & (distance >= 0)
        padded = torch.nn.functional.pad(wanted.any(1), (0, -keys % 64))
        assert torch.equal(kept[:, tile], padded.unflatten(1, (-1, 64)).any(2))


@shapes
def test_what_is_left_out_counts_for_nothing(queries: int, keys: int) -> None:
    given = prompt(queries, keys)
    selected, first = random_selection(keys), keys - queries
    kept = kept_blocks(selected, queries, keys, first_query=first, first_key=0)
    seen = kept.repeat_interleave(128, 1)[:, :queries].repeat_interleave(64, 2)[:, :, :keys]
    weights = last_weights(given.query, given.key) * seen
    mass = weights.sum(2, keepdim=True)
    found, log_sum = sparse(given, selected)
    expected = torch.einsum("hqk,khd->qhd", weights / mass, given.value.double())
    assert (found.double() - expected).norm() / expected.norm() < 1e-6
    _, dense_log_sum = dense(given)
    assert torch.allclose((log_sum - dense_log_sum).exp().double(), mass.squeeze(2), atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(70, 135), (130, 500), (300, 811)])
def test_merged_parts_of_the_keys_equal_one_pass(queries: int, keys: int) -> None:
    given = prompt(queries, keys)
    selected = random_selection(keys)
    whole, whole_log_sum = sparse(given, selected)
    bounds = [0, 64, 128, keys // 128 * 64 + 64, keys]
    parts = [
        sparse_prefill(*given.between(a, b), selected, first_query=keys - queries, first_key=a, scale=SCALE)
        for a, b in pairwise(bounds)
    ]
    out, log_sum = parts[0]
    for part in parts[1:]:
        merge_attention(out, log_sum, *part)
    assert torch.allclose(out, whole, atol=1e-5) and torch.allclose(log_sum, whole_log_sum, atol=1e-5)


def test_queries_before_all_keys_of_a_part_have_zeros() -> None:
    selected = random_selection(64 * 5)
    out, log_sum = sparse_prefill(*prompt(200, 64), selected, first_query=64, first_key=192, scale=SCALE)
    assert not out[:128].any() and (log_sum[:, :128] == float("-inf")).all()
    assert out[128:].any(dim=2).all() and log_sum[:, 128:].isfinite().all()


@pytest.mark.parametrize("recall", [0.0, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_selected_lines_hold_the_wanted_mass_of_the_last_queries(queries: int, keys: int, recall: float) -> None:
    given = prompt(min(queries, 64), keys)
    query, key = given.query, given.key * 4
    selected = select_lines(query, key, scale=SCALE, recall=recall)
    kept = kept_blocks(selected, len(query), keys, first_query=keys - len(query), first_key=0)
    seen = kept.repeat_interleave(128, 1)[:, : len(query)].repeat_interleave(64, 2)[:, :, :keys]
    mass = (last_weights(query, key) * seen).sum(2).mean(1)
    assert (mass >= recall - 1e-5).all()
    assert selected.columns[:, 0].all() and selected.slashes[:, :2].all()


def test_a_key_that_all_look_at_is_a_column_and_a_distance_is_a_slash() -> None:
    """Head 0 looks at the key at 1,000, head 1 at what is 1,500 keys back, head 2 at its neighbours."""
    keys, width = 4096, 64
    by_position = torch.nn.functional.normalize(torch.randn(keys, width), dim=1) * 8
    key = torch.stack([by_position] * 3, dim=1)
    query = torch.zeros(keys, 3, width)
    query[:, 0] = by_position[1000]
    query[1500:, 1] = by_position[:-1500]
    query[1:, 2] = by_position[:-1]
    selected = select_lines(query[-64:], key, scale=1.0, recall=0.9)
    columns, slashes = selected.columns[:, 1:], selected.slashes[:, 2:]
    assert columns.sum(1).tolist() == [1, 0, 0] and slashes.sum(1).tolist() == [0, 1, 0]
    assert columns[0, 1000 // 64 - 1] and slashes[1, 1500 // 64 - 2]
    value = torch.randn(keys, 3, 16)
    # Queries from the threshold on: all lose next to nothing, and few blocks are computed.
    first = 2048
    # All of a key is the head's own.
    given = Prompt(query[first:], key, key.new_empty(keys, 0), value)
    out, log_sum = sparse_prefill(*given, selected, first_query=first, first_key=0, scale=1.0)
    plan = plan_prefill([keys - first], [keys], CPU)
    expected, dense_log_sum = mla_prefill(*given, plan, scale=1.0)
    assert (log_sum - dense_log_sum).exp().min() > 0.99
    assert (out - expected).norm() / expected.norm() < 0.01
    kept = kept_blocks(selected, keys - first, keys, first_query=first, first_key=0)
    assert kept.float().mean() < 0.15


def test_one_key_for_all_heads_selects_as_the_same_key_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompt(64, 500)
    query, shared = given.query, given.key[:, :1]
    expected = select_lines(query, shared.expand(-1, HEADS, -1).contiguous(), scale=1.0, recall=0.7)
    # Head by head.
    monkeypatch.setattr(line_masses, "MOST_SCORES", 64 * 500)
    found = select_lines(query, shared, scale=1.0, recall=0.7)
    assert torch.equal(found.columns, expected.columns) and torch.equal(found.slashes, expected.slashes)
    assert not found.columns.all() and not found.slashes.all()


def test_log_sums_of_some_queries_are_those_of_dense_attention() -> None:
    given = prompt(130, 300)
    _, expected = dense(given)
    chosen = torch.tensor([0, 5, 129])
    found = attention_log_sums(given.query[chosen], given.key, chosen + 170, scale=SCALE)
    assert torch.allclose(found, expected[:, chosen], atol=1e-5)


# Queries, keys, the first key: the last sees none of the keys with some queries, some, and all.
PARTS = [(1, 1, 0), (70, 135, 0), (129, 129, 0), (200, 330, 0), (130, 192, 64), (200, 64, 192)]


def selection_on(device: torch.device, keys: int, heads: int = HEADS) -> Selection:
    columns, slashes = torch.rand(2, heads, -(-keys // 64)) < 0.3
    return Selection(columns.to(device), slashes.to(device))


@pytest.mark.parametrize(("queries", "keys", "first_key"), [(0, 0, 0), *PARTS, (300, 1800, 64)])
def test_lists_have_the_kept_blocks_from_the_last_on(
    queries: int, keys: int, first_key: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    monkeypatch.setattr(triton_blocks, "TOGETHER", 16)
    first_query = max(first_key + keys - queries, 0)
    spans = {"first_query": first_query, "first_key": first_key}
    selected = selection_on(device, max(first_key + keys, 1))
    kept = kept_blocks(selected, queries, keys, **spans)
    lists, counts = list_blocks(selected, queries, keys, **spans)
    assert lists.shape == kept.shape
    for head, tile in product(range(HEADS), range(kept.shape[1])):
        wanted = kept[head, tile].nonzero().flatten().flip(0).tolist()
        partial, count = counts[head, tile].tolist()
        assert lists[head, tile, :count].tolist() == wanted
        first = first_query + 128 * tile - first_key
        seen_whole = [block for block in wanted if block * 64 + 63 <= first and block * 64 + 64 <= keys]
        assert wanted[partial:] == seen_whole and partial <= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys", "first_key"), [(0, 0, 0), *PARTS])
def test_triton_attends_as_the_reference_does(
    queries: int, keys: int, first_key: int, dtype: torch.dtype, device: torch.device, poisoned: None
) -> None:
    given = Prompt(*(part.to(device, dtype) for part in prompt(queries, keys)))
    first_query = max(first_key + keys - queries, 0)
    spans = {"first_query": first_query, "first_key": first_key}
    selected = selection_on(device, max(first_key + keys, 1))
    kept = kept_blocks(selected, queries, keys, **spans)
    exact = Prompt(*(part.float() for part in given))
    expected, expected_log_sum = reference.sparse_prefill(*exact, kept, first_query - first_key, SCALE)
    lists = list_blocks(selected, queries, keys, **spans)
    found, log_sum = triton_sparse.sparse_prefill(*given, lists, first_query - first_key, SCALE)
    assert found.shape == expected.shape and found.dtype == dtype
    bound = 0.01 if dtype == torch.bfloat16 else 1e-5
    assert (found.float() - expected).norm() <= bound * expected.norm()
    assert torch.allclose(log_sum, expected_log_sum, atol=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("queries", "keys", "first_key"), [*PARTS, (1500, 3000, 0), (1100, 2000, 640)])
def test_deepseeks_shapes_are_attended_to(
    queries: int, keys: int, first_key: int, seed: int, device: torch.device, poisoned: None
) -> None:
    """On Hopper by the kernel in CUDA C++. Each seed has another place for the diagonal, and other blocks."""
    torch.manual_seed(seed)
    heads, first_query = 5, max(first_key + keys - queries, 0) + seed * 7
    parts = torch.randn(queries, heads, 192), *torch.randn(keys, heads, 256).split(128, dim=2), torch.randn(keys, 64)
    query, own, value, shared = (part.to(device, torch.bfloat16) for part in parts)
    given = Prompt(query, own, shared, value)
    selected = selection_on(device, first_query + queries, heads)
    spans = {"first_query": first_query, "first_key": first_key}
    kept = kept_blocks(selected, queries, keys, **spans)
    exact = Prompt(*(part.float() for part in given))
    expected, expected_log_sum = reference.sparse_prefill(*exact, kept, first_query - first_key, 0.1)
    found, log_sum = sparse_prefill(query, own, shared, value, selected, **spans, scale=0.1)
    assert (found.float() - expected).norm() <= 0.01 * expected.norm()
    assert torch.allclose(log_sum, expected_log_sum, atol=0.01)
