"""The lines of attention that hold most of a head's mass, found from a prompt's last queries."""

import math
from dataclasses import dataclass

import torch

from kernels.sparse_prefill.line_masses import BLOCK_KEYS, LineMasses, head_scores, line_masses

# As in MInference.
LAST_QUERIES = 64
# How many units the mass of one query is counted as.
MASS_UNITS = 1 << 24


@dataclass(frozen=True, slots=True)
class Selection:
    """What each head attends to. Line b of a kind is 64 lines of one key or one distance, from 64 b on."""

    # [heads, blocks] bool: columns, keys that all later queries attend to.
    columns: torch.Tensor
    # [heads, blocks] bool: slashes, distances from a query to a key.
    slashes: torch.Tensor

    @property
    def heads(self) -> int:
        return self.columns.shape[0]

    @property
    def blocks(self) -> int:
        return self.columns.shape[1]

    def of(self, heads: slice) -> "Selection":
        """What is selected for some heads."""
        return Selection(self.columns[heads], self.slashes[heads])


def select_lines(query: torch.Tensor, key: torch.Tensor, *, scale: float, recall: float) -> Selection:
    """The fewest of the heaviest lines that hold the share `recall` (0 to 1) of these queries' attention, per head.

    query: [queries, heads, width], the prompt's last, at most 64; key: [keys, heads or 1, width], all of the prompt, so
    that the last query sees all of them; one key for all heads is MLA's absorbed form. Both have one dtype; or keys are
    e4m3, as a pool may store latents, and queries are rounded to it. The last dimensions are contiguous. The first
    block of keys and the last two of distances are always kept: there the softmax puts what it has no use for (Xiao et
    al., "Streaming language models with attention sinks", 2024), and each query sees itself.
    Nothing here waits for the device.
    """
    assert 1 <= query.shape[0] <= min(key.shape[0], LAST_QUERIES) and 0 <= recall <= 1
    first = key.shape[0] - query.shape[0]
    wanted = math.ceil(query.shape[0] * recall * MASS_UNITS)
    if not query.is_cuda:
        return choose(line_masses(query, key, scale), first, wanted)
    # Imported here: a machine without a GPU may lack Triton.
    from kernels.sparse_prefill import triton_choice, triton_line_masses

    masses = triton_line_masses.line_masses(query, key, scale)
    return Selection(*triton_choice.choose(masses, first, wanted, MASS_UNITS))


def choose(masses: LineMasses, first: int, wanted: int) -> Selection:
    """The heaviest lines that together hold the mass `wanted`, in MASS_UNITS; first: the position of the first query.

    A line of 64 is as heavy as its heaviest, since a key or a distance that matters stands out among its neighbours.
    A part is kept if its column or its slash is, so it is as heavy as the heavier of the two. The heaviest parts are
    taken until their mass is enough; the lightest of them is the bound for lines. All are taken if rounding leaves too
    little. Equal masses give equal choices.
    """
    columns, slashes, blocks = masses.columns.clone(), masses.slashes.clone(), masses.columns.shape[1]
    # These lines weigh more than any sum of weights, so that they are kept whatever the bound is.
    columns[:, 0] = slashes[:, :2] = float("inf")
    block, neighbour = (torch.arange(*span, device=columns.device) for span in ((0, blocks), (-1, 2)))
    distance = first // BLOCK_KEYS - block.unsqueeze(1) + neighbour
    crossing = slashes[:, distance.clamp(0, blocks - 1)].masked_fill(distance < 0, 0)
    weight, order = torch.maximum(columns.unsqueeze(2), crossing).flatten(1).sort(descending=True)
    # Counted in whole numbers: on a GPU running sums of floats differ from run to run.
    mass = (masses.parts.flatten(1) * MASS_UNITS + 0.5).floor_().long().gather(1, order).cumsum(1)
    index = (mass < wanted).sum(1, keepdim=True)
    bound = torch.nn.functional.pad(weight, (0, 1)).gather(1, index)
    return Selection(columns >= bound, slashes >= bound)


def attention_log_sums(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """log(sum(exp(scale * query . key))) over all keys up to each query's position: [heads, queries] float32.

    query: [queries, heads, width]; key: [keys, heads or 1, width]; positions: [queries] int64.
    """
    hidden = torch.arange(key.shape[0], device=key.device) > positions.unsqueeze(1)
    groups = head_scores(query.float(), key.float(), scale)
    return torch.cat([scores.masked_fill_(hidden, float("-inf")).logsumexp(2) for scores in groups])
