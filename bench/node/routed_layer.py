"""One layer of DeepSeek-R1's routed experts over the GPUs of one host: ours in FP8 and in INT4, and deep_gemm's.

`python -m bench.node.routed_layer [--tokens 8 16 32 64 128 256] [--experts-a-rank 64 32] [--ours]`

Timed in a CUDA graph, from bfloat16 rows, with experts and weights chosen beforehand, to each row's bfloat16 sum on its
own rank: quantization, dispatch, both products, SwiGLU, combine. No gate, no shared expert. All have the same rows and
choices, drawn uniformly at random; several layers with weights of their own take turns. In the engine the norm before
an FP8 layer quantizes; here the layer does, as deep_gemm's does. deep_gemm (sgl-deep-gemm 0.1.4.post1, apache-tvm-ffi
0.1.11) compiles with nvcc before anything of it is timed; its sums are compared with ours of the same FP8 weights. If
it can be imported, our FP8 grouped products are its own where it is faster than ours (kernels/grouped_gemm). `--ours`
leaves it out as a peer. A floor is the bytes of the experts that are chosen on the busiest rank, at the rate of a copy.
"""

import argparse
import importlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from rich.console import Console
from torch import distributed

from bench.exchange.processes import on_each_gpu
from bench.kernels.timing import time_graph
from bench.node.mega_moe import MegaMoe, MegaWeights
from bench.node.routed_experts import (
    Inputs,
    RoutedLayer,
    draw_inputs,
    expert_bytes,
    make_layers,
    routed_config,
    touched,
)
from bench.node.routed_table import INT4, MEGA, OURS, Row, line, merged, table
from bench.rank.ceilings import measure_ceilings
from engine.exchange.peer import PeerExchange
from engine.model.expert_group import ExpertGroup
from engine.parallel.layout import Layout
from mesh.ports import free_port

TOKENS, EXPERTS_A_RANK = (8, 16, 32, 64, 128, 256), (64, 32)
# Layers of each form. The weights of any two exceed the second-level cache many times.
LAYERS = 4
# How often a graph runs through the layers. Ranks start a replay some microseconds apart, and that difference counts
# only once in a graph.
ROUNDS = 4
ResultT = TypeVar("ResultT")


class MegaMoeFailed(Exception):
    """deep_gemm's layer failed, on every rank in the same way."""


def measure(
    tokens: Sequence[int], experts_a_rank: Sequence[int], with_peer: bool, port: int, exchange: PeerExchange
) -> list[Row]:
    """Run by all ranks at once."""
    rate = measure_ceilings(torch.device("cuda")).bytes_per_second
    torch.cuda.empty_cache()
    place = exchange.place
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if with_peer:
        device = torch.device("cuda", torch.cuda.current_device())
        distributed.init_process_group("nccl", rank=place.rank, world_size=place.layout.world, device_id=device)
    rows: list[Row] = []
    with torch.no_grad():
        for count in experts_a_rank:
            rows += _Bench(exchange, count, max(tokens), with_peer).rows(tokens, rate)
            torch.cuda.empty_cache()
    exchange.check()
    if with_peer:
        distributed.destroy_process_group()
    return rows


class _Bench:
    """Layers of one number of experts, on one rank."""

    def __init__(self, exchange: PeerExchange, experts_a_rank: int, most_tokens: int, with_peer: bool) -> None:
        self._exchange, self._group = exchange, ExpertGroup(exchange)
        self._experts_a_rank, self._most_tokens = experts_a_rank, most_tokens
        self._console = Console(width=200, soft_wrap=True)
        experts, device = experts_a_rank * self._group.ranks, torch.device("cuda")
        self._configs = {OURS: routed_config(experts, "fp8"), INT4: routed_config(experts, "w4a8")}
        self._layers = {
            provider: make_layers(config, exchange, device, LAYERS) for provider, config in self._configs.items()
        }
        self._peer: MegaMoe | None = None
        self._failure: str | None = None
        self._weights: list[MegaWeights] = []
        if with_peer:
            try:
                self._peer, self._weights = self._agreed("to prepare", self._make_peer)
            except MegaMoeFailed as failed:
                self._failure = str(failed)

    def rows(self, tokens: Sequence[int], rate: float) -> list[Row]:
        found = []
        for count in tokens:
            found.append(self._row(count, rate))
            if self._group.rank == 0:
                self._console.print(line(found[-1]))
        if self._peer is not None:
            torch.cuda.synchronize()
            self._group.meet()
            self._peer.close()
        return found

    def _row(self, tokens: int, rate: float) -> Row:
        config, group = self._configs[OURS], self._group
        inputs = [draw_inputs(config, group, tokens, layer, torch.device("cuda")) for layer in range(LAYERS)]
        seconds = {}
        for provider, layers in self._layers.items():
            seconds[provider] = self._time([_ours(*each) for each in zip(layers, inputs, strict=True)])
        error, failure = None, self._failure
        if self._peer is not None:
            try:
                seconds[MEGA], error = self._time_peer(tokens, self._peer, inputs)
            except MegaMoeFailed as failed:
                failure = str(failed)
        busiest = sum(max(touched(each.all_choices, group.ranks, self._experts_a_rank)) for each in inputs) / LAYERS
        floors = {name: busiest * expert_bytes(each) / rate for name, each in self._configs.items()}
        return Row(group.ranks, self._experts_a_rank, tokens, seconds, floors, error, failure)

    def _time(self, calls: list[Callable[[], torch.Tensor]]) -> float:
        torch.cuda.synchronize()
        self._group.meet()
        seconds = time_graph(calls * ROUNDS)
        self._exchange.check()
        return seconds

    def _time_peer(self, tokens: int, peer: MegaMoe, inputs: list[Inputs]) -> tuple[float, float]:
        """Seconds of the peer's layer, and the error of its sums relative to ours."""
        calls = [
            peer.call(weights, each.hidden, each.choices, each.factors)
            for weights, each in zip(self._weights, inputs, strict=True)
        ]
        started = time.perf_counter()
        # The first call compiles and launches. The device waits for all ranks, the host does not.
        theirs = self._agreed(f"{tokens} tokens", calls[0]).clone()
        torch.cuda.synchronize()
        if self._group.rank == 0:
            self._console.print(f"deep_gemm, {tokens} tokens: first call {time.perf_counter() - started:.1f} s")
        self._group.meet()
        own = _ours(self._layers[OURS][0], inputs[0])().float()
        error = ((theirs.float() - own).norm() / own.norm()).item()
        return self._agreed(f"{tokens} tokens in a graph", lambda: self._time(calls)), error

    def _make_peer(self) -> tuple[MegaMoe, list[MegaWeights]]:
        config, world = self._configs[OURS], distributed.group.WORLD
        assert world is not None
        peer = MegaMoe(
            importlib.import_module("deep_gemm"),
            world,
            experts=config.n_routed_experts,
            choices=config.num_experts_per_tok,
            most_tokens=self._most_tokens,
            hidden=config.hidden_size,
            width=config.moe_intermediate_size,
        )
        return peer, [peer.weights(layer.experts.weights()) for layer in self._layers[OURS]]

    def _agreed(self, what: str, act: Callable[[], ResultT]) -> ResultT:
        """Call `act` on every rank; returns its result. Raises MegaMoeFailed if it failed on all ranks. If it failed on
        some only, raises the error of this rank: the other ranks' devices then wait for this one in vain.
        """
        failure: Exception | None = None
        try:
            made = act()
        except Exception as raised:  # noqa: BLE001
            # Any error of the peer is a result of this run. Our own layers are measured nevertheless.
            failure = raised
            self._console.print(f"rank {self._group.rank}: deep_gemm failed ({what}): {_said(raised)}", markup=False)
        failed = self._group.largest(float(failure is not None))
        if failed and not self._group.least(int(failure is not None)):
            raise RuntimeError(f"deep_gemm failed ({what}) on some ranks alone") from failure
        if failure is not None:
            raise MegaMoeFailed(f"{what}: {_said(failure)}") from failure
        return made


def _ours(layer: RoutedLayer, inputs: Inputs) -> Callable[[], torch.Tensor]:
    return partial(layer.compute, inputs)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a rank")
    parser.add_argument("--experts-a-rank", type=int, nargs="+", default=EXPERTS_A_RANK)
    parser.add_argument("--ours", action="store_true", help="without deep_gemm's")
    arguments = parser.parse_args()
    ranks = torch.cuda.device_count()
    if ranks < 2:
        parser.error(f"there are {ranks} CUDA devices here")
    act = partial(measure, arguments.tokens, arguments.experts_a_rank, not arguments.ours, free_port())
    rows = merged(on_each_gpu(Layout(dp=ranks, ep=ranks), act))
    console = Console(width=170)
    console.print(table(rows, torch.cuda.get_device_name()))
    for failure in dict.fromkeys(row.failure for row in rows if row.failure):
        console.print(f"deep_gemm's mega_moe was NOT measured: {failure}", markup=False)


if __name__ == "__main__":
    main()
