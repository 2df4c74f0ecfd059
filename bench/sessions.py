"""Sessions over a KV pool that holds a tenth of them: the time to first token with evicted blocks in host memory, and
without.

    python -m bench.sessions [--sessions 20] [--turns 8] [--pairs 2] [--shape moonlight]

A mesh of one decode worker serves the shipped model, or random weights of a published shape. Each pair starts it twice,
in alternating order, and sends it the same sessions, as `deepmesh bench --dataset sessions` does.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
from rich.console import Console
from rich.table import Table

from bench.meshes.model_mesh import model_mesh
from bench.meshes.random_model import write_random_model
from capacity.shapes import SHAPES
from loadgen.options import SESSIONS, LoadOptions
from loadgen.run import load
from loadgen.summary import Distribution, Summary
from mesh.blocks import blocks_for

ANSWER_TOKENS, TURN_TOKENS = 16, 48
POOL_PART = 10


@dataclass(frozen=True)
class Options:
    sessions: int
    turns: int
    prompt_tokens: int
    rate: float
    think_seconds: float
    pairs: int
    shape: str | None

    @property
    def session_blocks(self) -> int:
        """Blocks of a session at its end."""
        return blocks_for(self.prompt_tokens + self.turns * (ANSWER_TOKENS + TURN_TOKENS))

    @property
    def pool_blocks(self) -> int:
        return max(self.sessions * self.session_blocks // POOL_PART, 2 * self.session_blocks)


async def run(options: Options, host_blocks: int, seed: int, log: Path, model_dir: Path | None) -> Summary:
    """model_dir: a model without weights, or None for the shipped one."""
    settings = [f"decode.engine.total_blocks={options.pool_blocks}", f"decode.engine.host_blocks={host_blocks}"]
    if model_dir is not None:
        settings.append("decode.engine.random_weights=true")
    async with model_mesh(log, model_dir=model_dir, settings=settings) as mesh:
        asked = LoadOptions(
            grpc=mesh.gateway,
            dataset=SESSIONS,
            requests=options.sessions,
            rate=options.rate,
            isl=options.prompt_tokens,
            osl=ANSWER_TOKENS,
            turns=options.turns,
            turn_tokens=TURN_TOKENS,
            think_s=options.think_seconds,
            # Nothing is shared: each session is found again by itself alone.
            prefixes=0,
            seed=seed,
        )
        return (await load(asked)).summary


def _row(name: str, summary: Summary) -> Sequence[str]:
    later = next(each for each in summary.by_turn if each.turns.startswith("later"))
    first, rest = summary.ttft_ms, later.ttft_ms
    cached = (later.cached_tokens or 0) / later.input_tokens
    times = [_ms(first, "p50"), _ms(first, "p99"), _ms(rest, "p50"), _ms(rest, "p99")]
    return [name, *times, f"{cached:.0%}", f"{summary.requests_per_minute:.1f}", str(summary.completed)]


def _ms(times: Distribution | None, name: str) -> str:
    return "-" if times is None else f"{getattr(times, name):,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT of sessions with and without KV in host memory.")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=640, help="of a session's first request")
    parser.add_argument("--rate", type=float, default=0.2, help="sessions a second")
    parser.add_argument("--think-seconds", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    options = Options(**vars(parser.parse_args()))
    console, ways = Console(), {"without": 0, "host memory": 2 * options.sessions * options.session_blocks}
    table = Table(
        title=f"{options.sessions} sessions of {options.turns} turns, {options.session_blocks} blocks each at the end;"
        f" a pool of {options.pool_blocks} blocks",
        title_justify="left",
    )
    for heading in ("", "TTFT p50", "p99", "later turns p50", "p99, ms", "cached", "requests/min", "answered"):
        table.add_column(heading, justify="right")
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model_dir = None if options.shape is None else write_random_model(directory, options.shape)
        for pair in range(options.pairs):
            for name in (list(ways), list(ways)[::-1])[pair % 2]:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    summary = runner.run(run(options, ways[name], pair, directory / "log", model_dir))
                table.add_row(*_row(name, summary))
                console.print(*_row(name, summary))
    console.print(table)


if __name__ == "__main__":
    main()
