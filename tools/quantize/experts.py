"""A layer's experts in INT4, with scales that calibration found for their inputs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.weights.stored import PRE_SCALE
from tools.quantize.awq import best_pre_scale
from tools.quantize.error import Error, error_of, total
from tools.quantize.layer_pass import Routed
from tools.quantize.rounding import Int4, round_to_int4
from tools.quantize.source import Source

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST = 1e-10


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    # The tensors to write, by name.
    tensors: Mapping[str, torch.Tensor]
    weight_error: Error
    # Error of the experts' outputs for the calibration tokens, caused by the rounding of their weights.
    output_error: Error
    # The sum that the source's experts add to the residual: [tokens, hidden] float32.
    added: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Expert:
    """One expert, rounded."""

    tensors: Mapping[str, torch.Tensor]
    weight_error: Error
    output_error: Error
    # The outputs of the source's expert: [tokens that chose it, hidden].
    outputs: torch.Tensor
    # Largest magnitude of the input of its second product; 0 if no token chose it.
    largest_inner: float


def quantize_experts(source: Source, prefix: str, routed: Routed, *, awq: bool) -> QuantizedExperts:
    """Quantize the experts of the mixture whose tensors' names begin with `prefix`.

    One expert of the source is in memory at a time. AWQ needs two passes over the experts.
    """
    hidden = routed.hidden.float()
    pre_scale = _gate_up_pre_scale(source, prefix, routed, hidden) if awq else None
    tensors: dict[str, torch.Tensor] = {} if pre_scale is None else {f"{prefix}.experts.{PRE_SCALE}": pre_scale}
    scaled = hidden if pre_scale is None else hidden * pre_scale
    input_scale = _scale(float(scaled.abs().amax()))
    added = torch.zeros_like(hidden)
    experts = []
    for index, matrices in _matrices(source, prefix, range(source.config.n_routed_experts), ("gate", "up", "down")):
        tokens, weights = routed.of_expert(index)
        expert = _quantize(matrices, f"{prefix}.experts.{index}", hidden[tokens], pre_scale, awq=awq)
        added.index_add_(0, tokens, expert.outputs * weights.unsqueeze(1))
        tensors |= expert.tensors
        experts.append(expert)
    # An expert that no token chose gets the largest of the others.
    largest = max(expert.largest_inner for expert in experts)
    for index, expert in enumerate(experts):
        name = f"{prefix}.experts.{index}"
        inner_scale = _scale(expert.largest_inner or largest)
        tensors |= {f"{name}.w1.input_scale": input_scale.clone(), f"{name}.w3.input_scale": input_scale.clone()}
        tensors[f"{name}.w2.input_scale"] = inner_scale
    weight_error = total(expert.weight_error for expert in experts)
    return QuantizedExperts(tensors, weight_error, total(expert.output_error for expert in experts), added)


def _quantize(
    matrices: Sequence[torch.Tensor], name: str, rows: torch.Tensor, pre_scale: torch.Tensor | None, *, awq: bool
) -> _Expert:
    """matrices: gate, up, down; rows: [tokens that chose it, hidden] float32."""
    gate, up, down = matrices
    inner = _gated(rows, gate, up)
    outputs = inner @ down.t()
    tensors: dict[str, torch.Tensor] = {}
    down_pre_scale = None
    if awq:
        down_pre_scale = _down_pre_scale(inner, down)
        tensors[f"{name}.down_proj.{PRE_SCALE}"] = down_pre_scale
    rounded_gate = round_to_int4(gate, pre_scale, _importance(rows, pre_scale))
    rounded_up = round_to_int4(up, pre_scale, _importance(rows, pre_scale))
    rounded_down = round_to_int4(down, down_pre_scale, _importance(inner, down_pre_scale))
    for matrix, rounded in (("gate", rounded_gate), ("up", rounded_up), ("down", rounded_down)):
        tensors |= rounded.tensors(f"{name}.{matrix}_proj.weight")
    found = _gated(rows, rounded_gate.stands_for, rounded_up.stands_for) @ rounded_down.stands_for.t()
    scaled = inner if down_pre_scale is None else inner * down_pre_scale
    return _Expert(
        tensors,
        weight_error=total(_errors(((gate, rounded_gate), (up, rounded_up), (down, rounded_down)))),
        output_error=error_of(found, outputs),
        outputs=outputs,
        largest_inner=float(scaled.abs().amax()) if len(rows) else 0.0,
    )


def _matrices(
    source: Source, prefix: str, experts: Iterable[int], kinds: Sequence[str]
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Each expert's index with its matrices of these kinds."""
    listed = list(experts)
    names = [f"{prefix}.experts.{index}.{kind}_proj.weight" for index in listed for kind in kinds]
    read = source.matrices(names)
    for index in listed:
        yield index, [next(read) for _ in kinds]


def _errors(pairs: tuple[tuple[torch.Tensor, Int4], ...]) -> Iterator[Error]:
    return (error_of(rounded.stands_for, weight) for weight, rounded in pairs)


def _gate_up_pre_scale(source: Source, prefix: str, routed: Routed, hidden: torch.Tensor) -> torch.Tensor:
    """One pre-scale for all experts, because a token is quantized once, before it goes to its experts."""

    def products() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        chosen = [index for index in range(source.config.n_routed_experts) if len(routed.of_expert(index)[0])]
        for index, matrices in _matrices(source, prefix, chosen, ("gate", "up")):
            yield hidden[routed.of_expert(index)[0]], torch.cat(matrices)

    return best_pre_scale(hidden.abs().mean(dim=0), products())


def _down_pre_scale(inner: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The pre-scale of the second product; ones (plain rounding) if no calibration token reached the expert."""
    if not len(inner):
        return torch.ones_like(down[0])
    return best_pre_scale(inner.abs().mean(dim=0), [(inner, down)])


def _importance(rows: torch.Tensor, pre_scale: torch.Tensor | None) -> torch.Tensor | None:
    """Mean square of each channel, which weighs AWQ's clipping; None without AWQ or if no token reached the expert."""
    if pre_scale is None or not len(rows):
        return None
    return (rows * pre_scale).square().mean(dim=0)


def _gated(rows: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(rows @ gate.t()) * (rows @ up.t())


def _scale(largest: float) -> torch.Tensor:
    return torch.tensor([max(largest, SMALLEST) / LARGEST])
