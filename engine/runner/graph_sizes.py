"""Numbers of rows of captured decode steps. Pure."""

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.pace.tails import most_rows


def graph_sizes(config: EngineConfig) -> list[int]:
    """Ascending numbers of rows of decode graphs. Steps with drafts have no more rows than the state has."""
    most = config.max_requests
    if config.graph_rows is not None:
        sizes = {min(rows, most) for rows in config.graph_rows} if config.drafts.most else {*config.graph_rows}
    elif config.drafts.most:
        sizes = {*default_sizes(most, coarse=config.drafts.next_n == "auto")}
    else:
        sizes = {*default_sizes(most), *default_sizes(most_rows(most, config.max_step_tokens))}
    return sorted(sizes)


def kept_rows(config: EngineConfig) -> int:
    """Rows of all captured decode steps: each graph keeps its own output, and shares all other memory with the others.
    A row of a graph with drafts counts once for each of its tokens.
    """
    return sum(graph_sizes(config)) * sum(1 + depth for depth in graph_depths(config))


def graph_depths(config: EngineConfig) -> Sequence[int]:
    """How many drafts captured decode steps verify: there are graphs of all sizes for each depth."""
    drafts = config.drafts
    return range(1 + drafts.most) if drafts.next_n == "auto" else [drafts.most]


def default_sizes(max_requests: int, coarse: bool = False) -> list[int]:
    """Numbers of rows, closest together where one row more costs most. coarse: fewer, for graphs of several depths."""
    step = 16 if coarse else 8
    sizes = [1, 2, 4, 8, *range(step, min(max_requests, 128), step), *range(128, max_requests, 4 * step), max_requests]
    return sorted({size for size in sizes if size <= max_requests})
