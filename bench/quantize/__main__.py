"""Time and memory of `deepmesh quantize` and of the loader, at DeepSeek-R1's shape, on layers made on the machine.

`python -m bench.quantize [--shape r1|small] [--layers 3] [--dense 1] [--directory DIR] [--device auto|cpu|cuda]
[--sequences 16] [--tokens 512]`

A checkpoint in FP8 with random weights, in shards as large as DeepSeek's, is quantized to INT4 experts: by rounding
alone, by rounding with static scales of activations, and with AWQ. The first and the last result are loaded as a worker
loads them. Three layers, two of them with experts, take 27 GB; the results take 16 GB each, and only one exists at a
time.

Where layers and shards are units, they are the source's: a layer with experts, and the largest shard. Host memory is
anonymous memory, without the page cache, above what a process has once everything is imported. A plain read uses one
thread and reads 16 MiB at a time. "outputs" is the error of the experts' outputs for the calibration texts. Lines are
printed as they are measured.
"""

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.quantize import stages
from bench.quantize.stages import Options
from tools.quantize.run import choose_device


def measure(options: Options) -> None:
    _in_process(stages.make_source, options)
    _in_process(stages.quantize_plainly, options)
    _in_process(stages.load_plain, options)
    stages.remove(options.rounded)
    _in_process(stages.quantize_with_static_scales, options)
    stages.remove(options.scaled)
    _in_process(stages.quantize_with_awq, options)
    _in_process(stages.load_with_awq, options)
    _in_process(stages.load_from_disk, options)


def _in_process(stage: Callable[[Options], object], options: Options) -> None:
    """Run a stage in a process of its own, so that its memory is not counted with another stage's."""
    context = multiprocessing.get_context("forkserver")
    # The fork server imports the stages' modules once, and not each process.
    context.set_forkserver_preload([stages.__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(stage, options).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(stages.SHAPES), default="r1")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dense", type=int, default=1, help="how many of the layers have no experts")
    parser.add_argument("--directory", type=Path, help="where files are written, and removed; by default /tmp's")
    parser.add_argument("--device", default="auto", help="cpu or cuda; auto takes a GPU if there is one")
    parser.add_argument("--sequences", type=int, default=16, help="texts to calibrate with")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each of them, at most")
    arguments = parser.parse_args()
    device = str(choose_device(arguments.device))
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        shape = arguments.shape, arguments.layers, arguments.dense
        measure(Options(*shape, Path(directory), device, arguments.sequences, arguments.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
