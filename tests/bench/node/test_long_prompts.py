"""The measurement of one prompt on several ranks, on CPUs."""

from pathlib import Path

from bench.node.engines import RankEngine
from bench.node.long_prompts import Options, measure_prompts, table
from bench.rank.model import MeasuredModel, make_rank
from engine.config import EngineConfig, Hardware, resolve
from engine.exchange.host import HostExchange
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from tests.support.checkpoints import tiny_checkpoint
from tests.support.rank_threads import on_each_rank


def test_ranks_time_the_first_ones_prompts_together(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    options = Options(2, MeasuredModel("", 3, ""), (100, 200), 64, 2)

    def act(peers: Peers) -> list[float]:
        parallel = ParallelConfig(tp=1, dp=2, context_parallel_tokens=32, context_parallel_reach=512)
        config = EngineConfig(
            model_dir=directory, device="cpu", threads=1, max_requests=1, total_blocks=8, max_step_tokens=64,
            parallel=parallel, random_weights=True,
        )  # fmt: skip
        resolved, exchange = resolve(config, Hardware(0, 1 << 30)), HostExchange(peers)
        engine = RankEngine(resolved, make_rank(resolved, exchange), exchange, peers)
        return measure_prompts(engine, options, first=peers.place.rank == 0)

    seconds, nothing = on_each_rank(Layout(dp=2, ep=2), act)
    assert len(seconds) == 2 and min(seconds) > 0 and not nothing
    assert table(options, [seconds] * 3).row_count == 2
