"""A step that verifies drafts and guesses the next ones with the model's MTP module, run once a guess (Eagle).

Its rows draw after their last known token and after each draft. A draft is accepted if it is the token drawn in its
place, so that tokens are the same as without drafts; `engine.drafts.relaxation` may accept others. How many drafts were
accepted stays on the device: rows of the next step begin where that number says, before the host has read it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.batch import Row, Sample
from engine.drafts.draft_pass import DraftPass
from engine.drafts.plan import are_first
from engine.drafts.relaxation import Relaxation, RelaxationRule
from engine.model.context import DeviceState
from engine.model.model import Model
from engine.runner.launched_step import StepEvents
from engine.runner.prompt_logits import PendingPromptLogprobs
from engine.runner.sampler import PendingSamples, Sampler, keep
from kernels.decode_rows import NO_TOKEN
from kernels.host_copy import HostCopies, to_indices
from mesh.domain.outputs import PromptLogprobs


@dataclass(frozen=True, slots=True)
class Drafter:
    """What all steps share."""

    model: Model
    state: DeviceState
    sampler: Sampler
    # None if drafts are accepted strictly.
    rule: RelaxationRule | None = None


class DraftingStep:
    """An `engine.backend.Launched`: the model's layers are computed, or on a GPU enqueued."""

    def __init__(
        self,
        drafter: Drafter,
        rows: Sequence[Row],
        layers: DraftPass,
        on_layers: Callable[[int], None] | None,
        events: StepEvents | None,
        prompts: PendingPromptLogprobs | None = None,
    ) -> None:
        """layers: the pass of these rows, whose model layers are computed; on_layers: to call when the draft layer is
        computed too; events: None on a CPU; prompts: None if no row reports any.
        """
        self._drafter = drafter
        self._rows = len(rows)
        self._layers: DraftPass | None = layers
        self._draws = layers.draws
        self._on_layers = on_layers
        self._events = events
        self._prompts = prompts
        self._relaxation = _relaxation(drafter, rows, layers)
        # Lines of the rows that count tokens.
        self._counting = {
            line: rows[index] for line, index in enumerate(layers.draws.drawing) if rows[index].history is not None
        }
        self._samples: PendingSamples | None = None
        self._copies: HostCopies | None = None

    @torch.inference_mode()
    def draw(self) -> None:
        """Queue the draws, the draft layer's KV and the guesses."""
        layers, self._layers = self._layers, None
        assert layers is not None, "a step draws once"
        drafter, draws = self._drafter, self._draws
        token_ids = torch.zeros(0, dtype=torch.int64, device=layers.hidden.device)
        if draws.drawing:
            logits = drafter.model.logits(_some(layers.hidden, draws.tokens))
            replace = keep if self._relaxation is None else self._relaxation.apply
            before = _drafts_before(layers) if self._counting else None
            token_ids = drafter.sampler.draw(logits, draws.rows, replace, _positions(layers), before)
            self._samples = PendingSamples(logits, token_ids, draws.rows)
        accepted, drawn, guesses = layers.finish(token_ids)
        if self._counting:
            counting = to_indices(list(self._counting), drawn.device)
            drafter.sampler.count_yields(list(self._counting.values()), _yields(drawn[counting], accepted[counting]))
        if self._relaxation is not None:
            self._relaxation.note(drawn, accepted)
        if self._on_layers is not None:
            self._on_layers(drafter.model.config.kv_layers)
        if draws.drawing:
            lines = len(draws.drawing)
            taken = () if self._relaxation is None else (self._relaxation.taken,)
            self._copies = HostCopies((accepted[:lines], guesses[:lines], *taken))
        if self._events is not None:
            self._events.enqueued()

    def collect(self) -> list[Sample | None]:
        assert self._layers is None, "a step is collected after its draw"
        if self._events is not None:
            # KV that was not written yet must not be pushed, nor its blocks be given to others.
            self._events.synchronize()
        samples: list[Sample | None] = [None] * self._rows
        if self._copies is None or self._samples is None:
            return samples
        draws, drawn = self._draws, self._samples.read()
        accepted, guesses, *taken = (tensor.tolist() for tensor in self._copies.read())
        for index, first, count, guessed in zip(draws.drawing, draws.first, accepted, guesses, strict=True):
            relaxed = sum(taken[0][first : first + count]) if taken else 0
            samples[index] = _joined(drawn[first : first + count + 1], guessed, relaxed)
        for line, row in self._counting.items():
            self._drafter.sampler.settle(row, accepted[line] + 1)
        return samples

    def prompt_logprobs(self) -> Mapping[int, PromptLogprobs]:
        return {} if self._prompts is None else self._prompts.read()


def _relaxation(drafter: Drafter, rows: Sequence[Row], layers: DraftPass) -> Relaxation | None:
    """None if no row of the step asks for it."""
    drawing = [rows[index] for index in layers.draws.drawing]
    if drafter.rule is None or all(row.thinking is None for row in drawing):
        return None
    return Relaxation(drafter.rule, drawing, layers.draws, layers.drafts, drafter.state)


def _positions(layers: DraftPass) -> torch.Tensor:
    """The position of the token of each draw: [draws] int32."""
    places = torch.arange(layers.drafts.shape[1] + 1, dtype=torch.int32, device=layers.positions.device)
    grid = layers.positions.unsqueeze(1) + places
    return grid.view(-1)[to_indices(layers.draws.places, grid.device)]


def _drafts_before(layers: DraftPass) -> torch.Tensor:
    """For each draw, the drafts before it: [draws, n] int64. If one of them is wrong, the draw is discarded."""
    width = layers.drafts.shape[1] + 1
    lines, places = (
        to_indices([divmod(place, width)[part] for place in layers.draws.places], layers.drafts.device)
        for part in (0, 1)
    )
    before = torch.arange(width - 1, device=places.device) < places.unsqueeze(1)
    return layers.drafts[lines].masked_fill(~before, NO_TOKEN)


def _yields(drawn: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """What each line yields, [lines, 1 + n] int64: its accepted drafts and one more token, then NO_TOKEN."""
    places = torch.arange(drawn.shape[1], device=drawn.device)
    return drawn.masked_fill(places > accepted.unsqueeze(1), NO_TOKEN)


def _joined(samples: Sequence[Sample], drafts: Sequence[int], relaxed: int) -> Sample:
    """Join the accepted tokens, one sample each, into one sample."""
    token_ids = [token_id for sample in samples for token_id in sample.token_ids]
    logprobs = [each for sample in samples for each in sample.logprobs or ()]
    return Sample(token_ids, logprobs or None, drafts, relaxed)


def _some(rows: torch.Tensor, ascending: Sequence[int]) -> torch.Tensor:
    """The rows with these indices; a view if they are the first ones."""
    if are_first(ascending):
        return rows[: len(ascending)]
    return rows[to_indices(ascending, rows.device)]
