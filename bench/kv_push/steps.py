"""What pushes do to the tokens of running requests: a rank decodes while KV lands in its pool or leaves it.

    python -m bench.kv_push.steps --gpus 0 1 [--layers 61] [--rates 4 0]

The real engine over random weights decodes on the first GPU. A pool on the second GPU sends it the KV of prompts, as a
prefill worker does, or takes blocks that it offers, as a store does. Rounds without and with transfers take turns.
Rates are in prompts a second; with 0, transfers follow one another at once.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path

from bench.kv_push.peer import run_peer
from bench.kv_push.pools import Geometry
from launcher.gpus import find_gpus
from transfer.config import TransferConfig

PIECE_BYTES = 64 * 576 * 2
PROMPT_TOKENS = 4096
CONTEXT = 3500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs=2, metavar="GPU", default=("0", "1"), help="the rank's and the other's")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 0.0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=4, help="of each kind")
    parser.add_argument("--slot-bytes", type=int, default=64 << 20)
    arguments = parser.parse_args()
    # CUDA reads this variable once, when it is first used.
    os.environ["CUDA_VISIBLE_DEVICES"] = arguments.gpus[0]
    if not find_gpus():
        parser.error(f"a rank that decodes during transfers is measured on a GPU, and {arguments.gpus[0]} is none here")
    # Imported here, because it imports torch.
    from bench.kv_push.rank import PushedRank

    transfer = TransferConfig(slot_bytes=arguments.slot_bytes)
    with tempfile.TemporaryDirectory() as scratch:
        rank = PushedRank(Path(scratch), arguments.layers, arguments.requests, PROMPT_TOKENS, CONTEXT, transfer)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    geometry = Geometry(arguments.layers, PROMPT_TOKENS // 64, PIECE_BYTES)
    peer = context.Process(
        target=run_peer, args=(theirs, arguments.gpus[1], geometry, rank.namespace, transfer), daemon=True
    )
    peer.start()
    ours.recv()
    rank.meet(ours)
    rank.start_decoding()
    for name, begin in (("landing", rank.land), ("offered", rank.offer)):
        for rate in arguments.rates:
            quiet: list[float] = []
            busy: list[float] = []
            moved: list[float] = []
            for number in range(2 * arguments.rounds):
                # Contexts grow from round to round. The order quiet, moved, moved, quiet treats both kinds alike.
                if number % 4 in (0, 3):
                    quiet += rank.run(arguments.seconds).step_seconds
                    continue
                result = rank.run(arguments.seconds, begin, rate)
                busy += result.step_seconds
                moved += result.transfer_seconds
            _report(name, rate, quiet, busy, moved, arguments.seconds * arguments.rounds)
    peer.kill()
    peer.join()


def _report(name: str, rate: float, quiet: list[float], busy: list[float], moved: list[float], seconds: float) -> None:
    means = [statistics.fmean(steps) * 1e3 for steps in (quiet, busy)]
    medians = [statistics.median(steps) * 1e3 for steps in (quiet, busy)]
    sys.stdout.write(
        f"{name:8} {rate:4.1f}/s: {len(moved) / seconds:5.1f} a second, {statistics.median(moved) * 1e3:6.1f} ms each;"
        f" TPOT mean {means[0]:.3f} -> {means[1]:.3f} ms ({means[1] / means[0] - 1:+.2%}),"
        f" median {medians[0]:.3f} -> {medians[1]:.3f} ms ({medians[1] / medians[0] - 1:+.2%})\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
