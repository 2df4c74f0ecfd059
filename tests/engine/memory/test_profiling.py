"""The context lengths at which the memory of a step is measured."""

import pytest

from engine.memory.profiling import ends_of_prompts
from engine.model.expanded_attention import cut_heads
from engine.model.prompt_forms import EXPANDED_TOKENS


def expanded(heads: int, keys: int) -> int:
    """The most keys, counted by head, that are expanded at once."""
    return keys * max(part.stop - part.start for part in cut_heads(heads, keys, EXPANDED_TOKENS))


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("longest", [1000, 16384, 20000, 32768, 65536, 131072, 140000, 163840, 300000])
def test_measured_contexts_take_the_most_room_for_keys(heads: int, longest: int) -> None:
    measured = max(expanded(heads, end) for end in ends_of_prompts(longest))
    assert all(expanded(heads, keys) <= measured for keys in [*range(500, longest, 500), longest])
    assert max(ends_of_prompts(longest)) == longest
