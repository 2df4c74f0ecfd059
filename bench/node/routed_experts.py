"""Routed experts of DeepSeek-R1's shape on the ranks of a host, with random weights and given choices of experts."""

from dataclasses import dataclass

import torch

from capacity.floor import FP8, int4_bytes
from capacity.shapes import DEEPSEEK_R1, EXPERTS
from engine.exchange.interface import RankExchange
from engine.model.activations import Normalized
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig, parse_model_config
from engine.model.expert_group import ExpertGroup
from engine.model.formats.interface import Experts
from engine.model.gate import Gate
from engine.model.moe import MixtureOfExperts
from engine.model.quantization import Stored
from engine.weights.loading import make_allocator
from engine.weights.random_weights import fill_randomly
from kernels.act_quant import quantize
from kernels.moe_permute import combine


@dataclass(frozen=True)
class Inputs:
    """The inputs of one layer on one rank."""

    # [tokens, hidden] bfloat16.
    hidden: torch.Tensor
    # [tokens, k] each: the chosen experts, int64, and their weights, float32.
    choices: torch.Tensor
    factors: torch.Tensor
    # The choices of all ranks, [ranks * tokens, k], on the CPU.
    all_choices: torch.Tensor


def routed_config(experts: int, form: str) -> ModelConfig:
    """experts: how many all ranks have together, in one group. form: that of their weights, a key of `EXPERTS`."""
    changes = {"n_routed_experts": experts, "n_group": 1, "topk_group": 1, "quantization_config": EXPERTS[form]}
    return parse_model_config(dict(DEEPSEEK_R1) | changes)


def draw_inputs(config: ModelConfig, group: ExpertGroup, tokens: int, layer: int, device: torch.device) -> Inputs:
    """Every rank draws the same inputs of all ranks and keeps its own. A token's experts are distinct, and all experts
    are equally likely.
    """
    generator = torch.Generator().manual_seed(layer)
    drawn = torch.rand(group.ranks * tokens, config.n_routed_experts, generator=generator)
    chosen = drawn.topk(config.num_experts_per_tok).indices
    factors = torch.rand(chosen.shape, generator=generator) + 0.1
    factors *= config.routed_scaling_factor / factors.sum(1, keepdim=True)
    hidden = torch.randn(group.ranks * tokens, config.hidden_size, generator=generator)
    own = slice(group.rank * tokens, (group.rank + 1) * tokens)
    return Inputs(hidden[own].to(device).bfloat16(), chosen[own].to(device), factors[own].to(device), chosen)


def touched(choices: torch.Tensor, ranks: int, experts_a_rank: int) -> list[int]:
    """How many experts of each rank are chosen by at least one token."""
    owners = choices.unique() // experts_a_rank
    return torch.bincount(owners, minlength=ranks).tolist()


def expert_bytes(config: ModelConfig) -> float:
    """Bytes of one expert's weights, with the scales of INT4 (those of FP8 are a four-thousandth)."""
    item_bytes = int4_bytes(config.quantization.group) if config.quantization.experts is Stored.INT4 else FP8
    return 3 * config.hidden_size * config.moe_intermediate_size * item_bytes


class RoutedLayer:
    """A mixture of experts as the engine makes it, but with given choices."""

    def __init__(self, config: ModelConfig, index: int, allocate: Allocator) -> None:
        self._mixture = MixtureOfExperts(config, index, allocate)
        self._group = allocate.expert_group
        self._gate = self._mixture.gate = _GivenGate(config, allocate, 0)
        self._fill(index, allocate.device)
        self._mixture.finish()

    @property
    def experts(self) -> Experts:
        return self._mixture.experts

    def compute(self, inputs: Inputs) -> torch.Tensor:
        """[tokens, hidden]: the weighted sums of the chosen experts for this rank's rows. All ranks call it at once."""
        form = self.experts.input_form
        hidden = Normalized(inputs.hidden, quantize(inputs.hidden, powers=form.powers) if form.quantized else None)
        self._gate.chosen = inputs.factors, inputs.choices
        return self._group.sum_parts(combine(self._mixture.routed(hidden)))

    def _fill(self, index: int, device: torch.device) -> None:
        """Fill the weights with random numbers. Block scales differ, so that a misplaced scale shows in the results."""
        parameters = list(self._mixture.parameters(""))
        seed = index * self._group.ranks + self._group.rank
        fill_randomly(parameters, device, seed)
        generator = torch.Generator(device).manual_seed(seed)
        for parameter in parameters:
            if parameter.name.endswith("weight_scale_inv"):
                place = parameter.place
                place.mul_(torch.rand(place.shape, generator=generator, device=device) + 0.5)


class _GivenGate(Gate):
    chosen: tuple[torch.Tensor, torch.Tensor]

    def choose(self, hidden: Normalized, counted: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.chosen


def make_layers(config: ModelConfig, exchange: RankExchange, device: torch.device, count: int) -> list[RoutedLayer]:
    """Called by all ranks at once."""
    allocate = make_allocator(config, torch.bfloat16, device, "quantized", exchange)
    return [RoutedLayer(config, index, allocate) for index in range(count)]
