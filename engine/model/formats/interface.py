"""What layers need of a weight format: it allocates weights, says where published tensors go, and multiplies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.model.activations import Activations, InputForm, Sent
from engine.model.expert_group import ExpertGroup
from engine.model.parameters import NamedParameters
from engine.model.share import ModelShare
from kernels.fp8_gemm import Workspace
from kernels.norm import Matrix


class NewTensor(Protocol):
    """Makes an uninitialised tensor on the model's device, by default of the model's dtype."""

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Experts that are computed together: the routed ones, then the shared ones, each of one width."""

    routed: int
    shared: int
    hidden: int
    # The width of an expert, or the part of it that this rank has of routed experts; then no expert is shared.
    width: int
    # The number by which tokens choose the first routed expert; the others follow.
    first: int = 0
    # How many more experts, which other ranks hold, tokens choose among; then no expert is shared.
    elsewhere: int = 0
    # Which part of the published width `width` is.
    width_share: ModelShare = field(default_factory=ModelShare)
    # The numbers of the routed experts in the checkpoint, if not those by which tokens choose them.
    published: tuple[int, ...] | None = None

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the routed experts in the checkpoint."""
        return range(self.first, self.first + self.routed) if self.published is None else self.published

    @property
    def count(self) -> int:
        return self.routed + self.shared


class Linear(Protocol):
    """A linear layer. Its weight's rows may be several published matrices, one after another."""

    @property
    def input_form(self) -> InputForm:
        """The form in which the layer's input is to be made, perhaps by the kernel that computes that input."""

    @property
    def weight(self) -> Matrix | None:
        """[outputs, inputs], for kernels that do more than to multiply it by rows as they are, once it is finished.
        None if there are none for this format.
        """

    def parameters(self, *names: str) -> NamedParameters:
        """names: prefixes of the published matrices, in order."""

    def finish(self) -> None:
        """Called once, when all places are filled and before the first `forward`."""

    def forward(self, x: Activations, workspace: Workspace) -> torch.Tensor:
        """x: [tokens, inputs] in `input_form`, or plain where `kernels.fp8_gemm.takes_unquantized` says so. Returns
        [tokens, outputs] of the model's dtype.
        """


class Experts(Protocol):
    """The experts' feed-forward layers, computed as grouped products."""

    @property
    def input_form(self) -> InputForm:
        """The form of the tokens that `forward` takes."""

    def parameters(self, prefix: str) -> NamedParameters:
        """prefix: of the mixture, above `experts` and `shared_experts`."""

    def finish(self, group: ExpertGroup) -> None:
        """Called once, when all places are filled and before the first `forward`, by all ranks of the group."""

    def weights(self) -> Sequence[torch.Tensor]:
        """To be called after `finish`: tensors [routed, ...], whose entries at one index are one expert."""

    def to_send(self, hidden: Activations) -> Sent:
        """The tokens in few bytes, as `forward` takes them on other ranks. It knows nothing of those ranks' experts.
        hidden: in `input_form`.
        """

    def forward(self, hidden: Sent, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the chosen experts make of each token.

        hidden: [tokens, hidden] in `input_form`, or as `to_send` makes it; choices: [tokens, k] int64, shared experts
        last. Returns the rows and their positions, as `ExpertOutputs` has them.
        """


class WeightFormat(Protocol):
    """A format has no state: weights belong to the layers that it makes."""

    def takes(self, parts: Sequence[int], inputs: int) -> bool:
        """Whether it can hold a linear layer. parts: rows of the published matrices that one weight joins."""

    def linear(self, parts: Sequence[int], inputs: int, new: NewTensor) -> Linear:
        """A layer that it `takes`, uninitialised."""

    def takes_experts(self, shape: ExpertShape) -> bool:
        """Whether it can hold experts of this shape."""

    def experts(self, shape: ExpertShape, new: NewTensor) -> Experts:
        """Experts that it takes, uninitialised."""
