"""A decode step of DeepSeek-R1 with its experts over more and more GPUs: `python -m bench.fleet.expert_parallel`.

One rank's products were measured (capacity/measured), and how they change with the number of ranks is computed from
their floors; exchanges are computed from the links, whose rates and latencies are arguments. `--costs DIR` writes a
cost file for each number of GPUs, with which `deepmesh simulate` runs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated

import msgspec
import typer

from capacity.cards import H200
from capacity.floor import Operation, decode_floor, decode_operations
from capacity.links import Links, exchange_seconds
from capacity.plan import shipped_costs
from capacity.shapes import DEEPSEEK_R1, SHAPES
from engine.balance.placement import balancing, first_placement, imbalance
from engine.model.config import ModelConfig, parse_model_config
from engine.parallel.layout import Layout
from mesh.cost_file import CostFile, save_costs

MEASURED, MEASURED_SHAPE = "h200-r1-ep8-fp8.json", "r1-ep8-rank"
GPUS_A_HOST = 8
GPUS = (8, 16, 32)
# Requests a rank for which cost files have points.
POINTS = (8, 16, 32, 64, 96, 128)
KV_BYTES = 2
EXPONENT, DRAWS, COPIES = 0.8, 9, 2


@dataclass(frozen=True)
class Step:
    """Milliseconds of one decode step."""

    experts: float
    exchange: float
    rest: float

    @property
    def all(self) -> float:
        return self.experts + self.exchange + self.rest


def predict(gpus: int, rows: int, links: Links, *, wanted_only: bool, excess: float) -> Step:
    """rows: of each GPU; excess: (largest - mean) / mean of the ranks' load, whose largest all wait for."""
    config = parse_model_config(dict(DEEPSEEK_R1))
    costs = shipped_costs(MEASURED).costs
    context = int(costs.decode_context_tokens)
    layout = Layout(dp=gpus, ep=gpus, hosts=-(-gpus // GPUS_A_HOST))
    measured = parse_model_config(dict(SHAPES[MEASURED_SHAPE]))
    floor = decode_floor(decode_operations(measured, rows, context, KV_BYTES), H200.ceilings)
    # How many times as long as their floors the measured rank's products take.
    beyond = costs.decode_ms(rows) / floor
    operations = decode_operations(config, rows, context, KV_BYTES, layout=layout)
    experts = [_loaded(each, 1 + excess) for each in operations if each.name.startswith("experts")]
    rest = [each for each in operations if not each.name.startswith("experts")]
    exchange = exchange_seconds(config, rows, layout, links, wanted_only=wanted_only, excess=excess)
    return Step(
        beyond * decode_floor(experts, H200.ceilings),
        1000 * exchange * _mixtures(config),
        beyond * decode_floor(rest, H200.ceilings),
    )


def excesses(gpus: int) -> tuple[float, float]:
    """Imbalance of the ranks' loads by Zipf's law, with the experts in order, and moved with two copies a rank: medians
    of several draws.
    """
    in_order, moved = [], []
    for seed in range(DRAWS):
        loads = [1 / (1 + expert) ** EXPONENT for expert in range(DEEPSEEK_R1["n_routed_experts"])]
        Random(seed).shuffle(loads)
        in_order.append(imbalance(first_placement(len(loads), gpus, 0), loads))
        *_, found = balancing(first_placement(len(loads), gpus, COPIES), loads)
        assert found is not None
        moved.append(imbalance(found, loads))
    return median(in_order), median(moved)


def _loaded(operation: Operation, factor: float) -> Operation:
    """The bytes are those of the weights, whatever the load."""
    return replace(operation, flops=operation.flops * factor)


def _mixtures(config: ModelConfig) -> int:
    return sum(not config.is_dense(layer) for layer in range(config.num_hidden_layers))


def main(
    rows: Annotated[int, typer.Option(help="Requests of each GPU.")] = 16,
    host_gbps: Annotated[float, typer.Option(help="GB/s of a GPU to others of its host.")] = Links.host_rate / 1e9,
    host_us: Annotated[float, typer.Option(help="Latency there.")] = Links.host_seconds * 1e6,
    network_gbps: Annotated[float, typer.Option(help="GB/s of a GPU to other hosts.")] = Links.network_rate / 1e9,
    network_us: Annotated[float, typer.Option(help="Latency there, by DeepEP.")] = Links.network_seconds * 1e6,
    gather_us: Annotated[float, typer.Option(help="Latency there, by NCCL's collectives.")] = 210.0,
    costs: Annotated[Path | None, typer.Option(help="Folder for cost files.")] = None,
) -> None:
    by_deep_ep = Links(host_gbps * 1e9, host_us * 1e-6, network_gbps * 1e9, network_us * 1e-6)
    by_nccl = replace(by_deep_ep, network_seconds=gather_us * 1e-6)
    typer.echo(f"{rows} requests a GPU of {GPUS_A_HOST} a host, ms a step: experts + exchange + the rest\n")
    typer.echo("| GPUs, requests | all rows to all, experts in order | rows where wanted | and experts moved |")
    typer.echo("|---|---|---|---|")
    for gpus in GPUS:
        in_order, moved = excesses(gpus)

        def best(requests: int, gpus: int = gpus, excess: float = moved) -> Step:
            return predict(gpus, requests, by_deep_ep, wanted_only=gpus > GPUS_A_HOST, excess=excess)

        steps = (
            predict(gpus, rows, by_nccl, wanted_only=False, excess=in_order),
            best(rows, excess=in_order),
            best(rows),
        )
        typer.echo(f"| {gpus}, {gpus * rows} | {' | '.join(map(_shown, steps))} |")
        if costs is not None:
            points = tuple((float(each), best(each).all) for each in POINTS)
            file = shipped_costs(MEASURED)
            save_costs(_with_steps(file, points, gpus), costs / f"ep{gpus}.json")


def _with_steps(file: CostFile, points: tuple[tuple[float, float], ...], gpus: int) -> CostFile:
    costs = msgspec.structs.replace(file.costs, decode_steps=points)
    source = f"bench.fleet.expert_parallel, from: {file.source}"
    return msgspec.structs.replace(file, costs=costs, layout=f"dp {gpus}, ep {gpus}, computed", source=source)


def _shown(step: Step) -> str:
    return f"{step.experts:.1f} + {step.exchange:.1f} + {step.rest:.1f} = {step.all:.1f}"


if __name__ == "__main__":
    typer.run(main)
