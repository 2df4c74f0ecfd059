from itertools import product
from typing import NamedTuple

import pytest
import torch

from kernels.act_quant import dequantize, empty_quantized, quantize
from kernels.mla_prefill import mla_prefill, plan_prefill
from kernels.sparse_prefill import (
    Selection,
    attention_log_sums,
    kept_blocks,
    line_masses,
    reference,
    select_lines,
    sparse_prefill,
    sparse_prefill_and_quantize,
    triton_blocks,
)
from kernels.sparse_prefill import triton as triton_sparse
from kernels.sparse_prefill.triton_blocks import list_blocks
from tests.support.combinations import crossed

CPU = torch.device("cpu")
SCALE = 0.3
HEADS = 3
# Queries and keys of a prompt: its last queries, after a cached prefix or not, around the bounds of tiles and blocks.
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
        """The same queries, and keys from `begin` to `end`."""
        return Prompt(self.query, *(part[begin:end] for part in self[1:]))


def prompt(queries: int, keys: int) -> Prompt:
    parts = torch.randn(keys, HEADS, 16), torch.randn(keys, 8), torch.randn(keys, HEADS, 16)
    return Prompt(torch.randn(queries, HEADS, 24), *parts)


def random_selection(keys: int, share: float = 0.3, heads: int = HEADS) -> Selection:
    columns, slashes = torch.rand(2, heads, -(-keys // 64)) < share
    columns[:, 0] = slashes[:, :2] = True
    return Selection(columns, slashes)


def dense(given: Prompt, scale: float = SCALE) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sums of causal attention to all keys."""
    out, plan = empty_results(given)[0], plan_prefill([len(given.query)], [given.keys], CPU)
    mla_prefill(*given, plan, out, scale=scale)
    positions = torch.arange(given.keys - len(given.query), given.keys)
    return out, attention_log_sums(given.query, given.key, positions, scale=scale)


def sparse(given: Prompt, selected: Selection) -> tuple[torch.Tensor, torch.Tensor]:
    return attended(given, selected, given.keys - len(given.query), SCALE)


def attended(given: Prompt, selected: Selection, first_query: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    results = empty_results(given)
    sparse_prefill(*given, selected, *results, first_query=first_query, scale=scale)
    return results


def empty_results(given: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    queries, heads, _ = given.query.shape
    out = given.query.new_empty(queries, heads, given.value.shape[2])
    return out, given.query.new_empty(heads, queries, dtype=torch.float32)


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
    """Token by token: each selected key or distance is seen, and the rest of its blocks too."""
    selected, first = random_selection(keys), keys - queries
    kept = kept_blocks(selected, queries, keys, first)
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
    kept = kept_blocks(selected, queries, keys, first)
    seen = kept.repeat_interleave(128, 1)[:, :queries].repeat_interleave(64, 2)[:, :, :keys]
    weights = last_weights(given.query, given.key) * seen
    mass = weights.sum(2, keepdim=True)
    found, log_sum = sparse(given, selected)
    expected = torch.einsum("hqk,khd->qhd", weights / mass, given.value.double())
    assert (found.double() - expected).norm() / expected.norm() < 1e-6
    _, dense_log_sum = dense(given)
    assert torch.allclose((log_sum - dense_log_sum).exp().double(), mass.squeeze(2), atol=1e-5)


def test_some_heads_leave_the_results_of_others_alone() -> None:
    given, selected, some = prompt(130, 500), random_selection(500), slice(1, 3)
    expected = sparse(given, selected)
    found = torch.full_like(expected[0], 7), torch.full_like(expected[1], 7)
    parts = given.query[:, some], given.own[:, some], given.shared, given.value[:, some]
    results = found[0][:, some], found[1][some]
    sparse_prefill(*parts, selected.of(some), *results, first_query=370, scale=SCALE)
    assert torch.allclose(results[0], expected[0][:, some], atol=1e-6)
    assert torch.allclose(results[1], expected[1][some], atol=1e-5)
    assert (found[0][:, 0] == 7).all() and (found[1][0] == 7).all()


def test_outputs_of_some_heads_may_be_quantized_into_some_rows() -> None:
    value, selected = torch.randn(200, 4, 64), random_selection(200, heads=4)
    given = Prompt(torch.randn(130, 4, 24), torch.randn(200, 4, 16), torch.randn(200, 8), value)
    out, some = empty_quantized(140, 256, device=CPU), slice(2, 4)
    parts = given.query[:, some], given.own[:, some], given.shared, given.value[:, some]
    columns = out.rows(3, 133).columns(128, 256)
    sparse_prefill_and_quantize(*parts, selected.of(some), columns, first_query=70, scale=SCALE)
    values, _ = sparse(given, selected)
    expected = dequantize(quantize(values[:, some].flatten(1)))
    assert torch.equal(dequantize(out)[3:133, 128:], expected)


def test_queries_without_selected_keys_have_zeros() -> None:
    selected = random_selection(200)
    selected.columns[:] = selected.slashes[:] = False
    selected.columns[:, 3] = True
    out, log_sum = sparse(prompt(200, 200), selected)
    assert not out[:192].any() and (log_sum[:, :192] == float("-inf")).all()
    assert out[192:].any(dim=2).all() and log_sum[:, 192:].isfinite().all()


@pytest.mark.parametrize("recall", [0.0, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_selected_lines_hold_the_wanted_mass_of_the_last_queries(queries: int, keys: int, recall: float) -> None:
    given = prompt(min(queries, 64), keys)
    query, key = given.query, given.key * 4
    selected = select_lines(query, key, scale=SCALE, recall=recall)
    kept = kept_blocks(selected, len(query), keys, keys - len(query))
    seen = kept.repeat_interleave(128, 1)[:, : len(query)].repeat_interleave(64, 2)[:, :, :keys]
    mass = (last_weights(query, key) * seen).sum(2).mean(1)
    assert (mass >= recall - 1e-5).all()
    assert selected.columns[:, 0].all() and selected.slashes[:, :2].all()


def test_popular_keys_are_columns_and_popular_distances_slashes() -> None:
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
    # From this query on, all lose next to nothing, and few blocks are computed.
    first = 2048
    # Heads share no part of the keys.
    given = Prompt(query[first:], key, key.new_empty(keys, 0), value)
    out, log_sum = attended(given, selected, first, 1.0)
    expected, dense_log_sum = dense(given, 1.0)
    assert (log_sum - dense_log_sum).exp().min() > 0.99
    assert (out - expected).norm() / expected.norm() < 0.01
    kept = kept_blocks(selected, keys - first, keys, first)
    assert kept.float().mean() < 0.15


def test_a_shared_key_selects_as_equal_keys_do(monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompt(64, 500)
    query, shared = given.query, given.key[:, :1]
    expected = select_lines(query, shared.expand(-1, HEADS, -1).contiguous(), scale=1.0, recall=0.7)
    # One head at a time.
    monkeypatch.setattr(line_masses, "MOST_SCORES", 64 * 500)
    found = select_lines(query, shared, scale=1.0, recall=0.7)
    assert torch.equal(found.columns, expected.columns) and torch.equal(found.slashes, expected.slashes)
    assert not found.columns.all() and not found.slashes.all()


def test_log_sums_are_those_of_attention_to_all_keys() -> None:
    given = prompt(130, 300)
    _, expected = sparse(given, random_selection(300, share=2))
    chosen = torch.tensor([0, 5, 129])
    found = attention_log_sums(given.query[chosen], given.key, chosen + 170, scale=SCALE)
    assert torch.allclose(found, expected[:, chosen], atol=1e-5)


# Queries, keys, the first query: the last prompts have fewer keys than their queries could see.
PROMPTS = [(1, 1, 0), (70, 135, 65), (129, 129, 0), (200, 330, 130), (130, 192, 126), (200, 64, 0), (200, 64, 20)]


def selection_on(device: torch.device, keys: int, heads: int = HEADS) -> Selection:
    columns, slashes = torch.rand(2, heads, -(-keys // 64)) < 0.3
    return Selection(columns.to(device), slashes.to(device))


@pytest.mark.parametrize(("queries", "keys", "first_query"), [(0, 0, 0), *PROMPTS, (300, 1800, 1500)])
def test_lists_have_the_kept_blocks_from_the_last_on(
    queries: int, keys: int, first_query: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    monkeypatch.setattr(triton_blocks, "TOGETHER", 16)
    selected = selection_on(device, first_query + queries)
    kept = kept_blocks(selected, queries, keys, first_query)
    lists, counts = list_blocks(selected, queries, keys, first_query)
    assert lists.shape == kept.shape
    for head, tile in product(range(HEADS), range(kept.shape[1])):
        wanted = kept[head, tile].nonzero().flatten().flip(0).tolist()
        partial, count = counts[head, tile].tolist()
        assert lists[head, tile, :count].tolist() == wanted
        first = first_query + 128 * tile
        seen_whole = [block for block in wanted if block * 64 + 63 <= first and block * 64 + 64 <= keys]
        assert wanted[partial:] == seen_whole and partial <= 3


@crossed(queries__keys__first_query=[(0, 0, 0), *PROMPTS], dtype=[torch.float32, torch.bfloat16])
def test_triton_attends_as_the_reference_does(
    queries: int, keys: int, first_query: int, dtype: torch.dtype, device: torch.device, poisoned: None
) -> None:
    given = Prompt(*(part.to(device, dtype) for part in prompt(queries, keys)))
    selected = selection_on(device, first_query + queries)
    exact = Prompt(*(part.float() for part in given))
    expected, found = empty_results(exact), empty_results(given)
    kept = kept_blocks(selected, queries, keys, first_query)
    reference.sparse_prefill(*exact, kept, *expected, first_query, SCALE)
    triton_sparse.sparse_prefill(*given, list_blocks(selected, queries, keys, first_query), *found, first_query, SCALE)
    bound = 0.01 if dtype == torch.bfloat16 else 1e-5
    assert (found[0].float() - expected[0]).norm() <= bound * expected[0].norm()
    assert torch.allclose(found[1], expected[1], atol=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("queries", "keys", "first_query"), [*PROMPTS, (1500, 3000, 1500), (1100, 1700, 1300)])
def test_deepseeks_shapes_are_attended_to(
    queries: int, keys: int, first_query: int, seed: int, device: torch.device, poisoned: None
) -> None:
    """On Hopper by the kernel in CUDA C++, some of the heads. Each seed has another place for the diagonal, and other
    blocks.
    """
    torch.manual_seed(seed)
    heads, some, first = 7, slice(2, 7), first_query + seed * 7
    parts = torch.randn(queries, heads, 192), *torch.randn(keys, 5, 256).split(128, dim=2), torch.randn(keys, 64)
    query, own, value, shared = (part.to(device, torch.bfloat16) for part in parts)
    all_heads = query.new_full((queries, heads, 128), 7), query.new_full((heads, queries), 7, dtype=torch.float32)
    given, found = Prompt(query[:, some], own, shared, value), (all_heads[0][:, some], all_heads[1][some])
    selected = selection_on(device, first + queries, 5)
    exact = Prompt(*(part.float() for part in given))
    expected, kept = empty_results(exact), kept_blocks(selected, queries, keys, first)
    reference.sparse_prefill(*exact, kept, *expected, first, 0.1)
    sparse_prefill(*given, selected, *found, first_query=first, scale=0.1)
    assert (found[0].float() - expected[0]).norm() <= 0.01 * expected[0].norm()
    assert torch.allclose(found[1], expected[1], atol=0.01)
    assert (all_heads[0][:, :2] == 7).all() and (all_heads[1][:2] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "keys", "first_query"), [*PROMPTS, (1500, 3000, 1500)])
def test_outputs_of_some_heads_are_quantized_on_the_way(
    queries: int, keys: int, first_query: int, device: torch.device, poisoned: None
) -> None:
    """On Hopper by the kernel in CUDA C++, from sums that are not rounded to bf16."""
    parts = torch.randn(queries, 5, 192), *torch.randn(keys, 5, 256).split(128, dim=2), torch.randn(keys, 64)
    query, own, value, shared = (part.to(device, torch.bfloat16) for part in parts)
    given, selected = Prompt(query, own, shared, value), selection_on(device, first_query + queries, 5)
    # No query has zeros.
    selected.columns[:, 0] = True
    out = empty_quantized(queries + 8, 7 * 128, device=device)
    out.values.view(torch.uint8).fill_(7)
    out.scales.fill_(7)
    columns = out.rows(3, 3 + queries).columns(256, 896)
    sparse_prefill_and_quantize(*given, selected, columns, first_query=first_query, scale=0.1)
    values, _ = attended(given, selected, first_query, 0.1)
    expected = values.flatten(1).float()
    found, scales = dequantize(out)[3 : 3 + queries, 256:], out.scales[3 : 3 + queries, 2:]
    # Three bits of a mantissa: some 2.7%.
    assert (found - expected).norm() <= 0.04 * expected.norm()
    assert torch.allclose(scales, quantize(values.flatten(1)).scales, rtol=0.005)
    scales[:] = 7
    assert (out.values.view(torch.uint8)[:, :256] == 7).all() and (out.scales == 7).all()
