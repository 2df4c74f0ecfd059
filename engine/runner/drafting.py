"""A step that verifies drafts and guesses the next ones with the model's MTP module, run once a guess (Eagle).

Its rows draw behind their last known token and behind each draft. A draft is accepted if it is the token drawn in its
place, so tokens are those that are drawn without drafts; `engine.runner.relaxation` may take it for that. How many were
accepted is known on the device first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from engine.batch import Row, Sample, StepShape
from engine.model.context import DeviceState, ForwardContext
from engine.model.decode_inputs import NO_ROW, DecodeInputs
from engine.model.inputs import build_context, decode_context
from engine.model.model import Model
from engine.runner.draft_plan import DraftRows, Draws, plan_draft_rows, plan_draws
from engine.runner.relaxation import Relaxation, RelaxationRule
from engine.runner.sampler import PendingSamples, Replace, Sampler, keep
from engine.runner.step_events import StepEvents
from kernels.host_copy import HostCopies, to_device
from kernels.sample import greedy
from mesh.blocks import BLOCK_TOKENS

# Stands for no draft: no token is equal to it.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Drafter:
    """What all steps share."""

    model: Model
    state: DeviceState
    sampler: Sampler
    # To how many tokens a forward pass is padded.
    size: Callable[[int], int]
    # None if drafts are accepted strictly.
    rule: RelaxationRule | None = None


class DraftingStep:
    """engine.batch.Launched: the model's layers are computed, or on a GPU enqueued."""

    def __init__(
        self,
        drafter: Drafter,
        rows: Sequence[Row],
        shape: StepShape,
        hidden: torch.Tensor,
        on_layers: Callable[[int], None] | None,
        events: StepEvents | None,
    ) -> None:
        """shape: what ranks agreed on; hidden: [tokens or more, hidden], of the rows' tokens; on_layers: to call when
        the draft layer is computed too; events: None on a CPU.
        """
        self._drafter = drafter
        self._rows = len(rows)
        self._shape = shape
        self._hidden: torch.Tensor | None = hidden
        self._on_layers = on_layers
        self._events = events
        self._draws = plan_draws(rows)
        self._draft_rows = plan_draft_rows(rows, self._draws, drafter.state.padding_block)
        self._relaxation = _relaxation(drafter, rows, self._draws)
        self._samples: PendingSamples | None = None
        self._copies: HostCopies | None = None

    @torch.inference_mode()
    def draw(self) -> None:
        """Queue the draws, the draft layer's KV and the guesses."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "a step draws once"
        drafter, draws = self._drafter, self._draws
        token_ids = accepted = torch.zeros(0, dtype=torch.int64, device=hidden.device)
        if draws.drawing:
            logits = drafter.model.logits(hidden[_indices(draws.tokens, hidden.device)])
            token_ids = _draw(drafter, logits, draws, self._relaxation)
            accepted = count_accepted(token_ids, draws.first, draws.drafts)
            self._samples = PendingSamples(logits, token_ids, draws.rows)
        shape = self._shape
        size = drafter.size(shape.tokens + shape.beginning)
        states = _compute_draft_layer(drafter, self._draft_rows, hidden, token_ids, size)
        if self._on_layers is not None:
            self._on_layers(drafter.model.config.kv_layers)
        if shape.drawing:
            # Ranks guess together, whichever of them draw.
            guesses = _guess(drafter, self._draft_rows, states, accepted, shape)
            taken = () if self._relaxation is None else (self._relaxation.taken,)
            self._copies = HostCopies((accepted, guesses, *taken))
        if self._events is not None:
            self._events.enqueued()

    def collect(self) -> list[Sample | None]:
        assert self._hidden is None, "a step is collected after its draw"
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
        return samples


def count_accepted(token_ids: torch.Tensor, first: Sequence[int], drafts: Sequence[Sequence[int]]) -> torch.Tensor:
    """How many drafts of each row equal the tokens drawn in their places, up to the first that does not.

    token_ids: [draws] int64; first: each row's first draw. Returns [rows] int64.
    """
    most = max(len(each) for each in drafts)
    guessed = np.full((len(drafts), most), NO_TOKEN, np.int64)
    for row, each in zip(guessed, drafts, strict=True):
        row[: len(each)] = each
    places = np.array(first, np.int64)[:, None] + np.arange(most)
    # Places behind a row's draws are compared with no draft.
    places = np.minimum(places, len(token_ids) - 1)
    drawn = token_ids[to_device(places, token_ids.device)]
    equal = drawn == to_device(guessed, token_ids.device)
    return equal.long().cumprod(1).sum(1)


def _relaxation(drafter: Drafter, rows: Sequence[Row], draws: Draws) -> Relaxation | None:
    """None if no row of the step asks for it."""
    drawing = [rows[index] for index in draws.drawing]
    if drafter.rule is None or all(row.thinking is None for row in drawing):
        return None
    return Relaxation(drafter.rule, drawing, draws, drafter.state.device)


def _draw(drafter: Drafter, logits: torch.Tensor, draws: Draws, relaxation: Relaxation | None) -> torch.Tensor:
    """A token for each draw: [draws] int64. logits: [draws, vocabulary].

    Draws of a row that counts tokens follow one another, since each depends on the token before; the others are drawn
    at once.
    """
    sampler, drawn = drafter.sampler, drafter.state.drawn
    rounds: list[list[int]] = [[]]
    for first, drafts in zip(draws.first, draws.drafts, strict=True):
        sampling = draws.rows[first].sampling
        assert sampling is not None
        for draw in range(1 + len(drafts)):
            number = draw if sampling.counts_tokens else 0
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(first + draw)
    if len(rounds) == 1:
        return sampler.draw(logits, draws.rows, drawn, _replace(relaxation, range(len(draws.rows))))
    token_ids = torch.empty(len(draws.rows), dtype=torch.int64, device=logits.device)
    for chosen in rounds:
        indices = _indices(chosen, logits.device)
        rows = [draws.rows[index] for index in chosen]
        token_ids[indices] = sampler.draw(logits[indices], rows, drawn, _replace(relaxation, chosen))
    return token_ids


def _replace(relaxation: Relaxation | None, draws: Sequence[int]) -> Replace:
    """For the sampler, which is given these draws and names them by their order."""
    if relaxation is None:
        return keep
    return lambda logits, token_ids, rows: relaxation.apply(logits, token_ids, [draws[row] for row in rows])


def _compute_draft_layer(
    drafter: Drafter, plan: DraftRows, hidden: torch.Tensor, token_ids: torch.Tensor, size: int
) -> torch.Tensor:
    """Write the draft layer's KV of all rows. Returns its hidden states: [size, hidden]."""
    model, state, device = drafter.model, drafter.state, hidden.device
    context = build_context(model.config, plan.rows, state, size)
    if plan.drawn:
        places, drawn = (_indices(each, device) for each in zip(*plan.drawn, strict=True))
        context.token_ids[places] = token_ids[drawn]
    # Zeros come before a prompt's first token, and before padding.
    nothing = len(hidden)
    sources = [nothing if source is None else source for source in plan.sources]
    sources += [nothing] * (size - plan.tokens)
    before = torch.cat((hidden, hidden.new_zeros(1, hidden.shape[1])))[_indices(sources, device)]
    return model.draft(before, context)


def _guess(
    drafter: Drafter, plan: DraftRows, states: torch.Tensor, accepted: torch.Tensor, shape: StepShape
) -> torch.Tensor:
    """The tokens that may follow each row's last accepted one: [rows, drafts] int64.

    Guess by guess the module reads its own hidden state and guess. states: [tokens, hidden]; accepted: [rows] int64.
    Rows are padded to as many as any rank has.
    """
    model, device, rows = drafter.model, states.device, len(accepted)
    padding = [0] * (shape.drawing - rows)
    accepted = functional.pad(accepted, (0, len(padding)))
    table = _block_table(plan, drafter.state.padding_block, shape, device)
    positions = _indices([*plan.positions, *padding], device) + accepted
    hidden = states[_indices([*plan.first_drawn, *padding], device) + accepted]
    guesses: list[torch.Tensor] = []
    for number in range(shape.drafts):
        if number:
            hidden = model.draft(hidden, _next_context(drafter, guesses[-1], positions + number, table))
        guesses.append(greedy(model.logits(hidden)))
    return torch.stack(guesses, dim=1)[:rows] if guesses else accepted.new_zeros(rows, 0)


def _next_context(
    drafter: Drafter, token_ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> ForwardContext:
    """One guess a row at these positions."""
    follows = torch.full_like(positions, NO_ROW, dtype=torch.int32)
    return decode_context(DecodeInputs(token_ids.int(), follows, positions.int(), table), drafter.state)


def _block_table(plan: DraftRows, padding_block: int, shape: StepShape, device: torch.device) -> torch.Tensor:
    """[rows, blocks] int32, with room for all guesses; what has no block goes to the padding block."""
    # The last of the drawn tokens, and then all guesses but one, which nothing follows.
    last = max((row.end for row in plan.rows), default=1) - 1 + shape.drafts
    width = last // BLOCK_TOKENS + 1
    table = np.full((shape.drawing, width), padding_block, np.int32)
    for row, blocks in zip(table, plan.tables, strict=False):
        count = min(len(blocks), width)
        row[:count] = blocks[:count]
    return to_device(table, device)


def _joined(samples: Sequence[Sample], drafts: Sequence[int], relaxed: int) -> Sample:
    """One sample of the accepted tokens, each of which comes as a sample of its own."""
    token_ids = [token_id for sample in samples for token_id in sample.token_ids]
    logprobs = [each for sample in samples for each in sample.logprobs or ()]
    return Sample(token_ids, logprobs or None, drafts, relaxed)


def _indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(values, np.int64), device)
