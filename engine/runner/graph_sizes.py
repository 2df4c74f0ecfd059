"""Numbers of rows of captured decode steps. Pure."""

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
    drafts = config.drafts
    depths = range(1 + drafts.most) if drafts.next_n == "auto" else [drafts.most]
    return sum(graph_sizes(config)) * sum(1 + depth for depth in depths)


def default_sizes(max_requests: int, coarse: bool = False) -> list[int]:
    """Numbers of rows, closest together where one row more costs most. coarse: fewer, for graphs of several depths."""
    step = 16 if coarse else 8
    sizes = [1, 2, 4, 8, *range(step, min(max_requests, 128), step), *range(128, max_requests, 4 * step), max_requests]
    return sorted({size for size in sizes if size <= max_requests})
