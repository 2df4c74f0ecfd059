"""Moves experts between a worker's ranks while they serve, so that each has as much to do.

All ranks make the same calls between the same steps and decide alike from the same sums: nothing else is agreed on. A
move is queued on the device between two steps. So no token meets a slot that is half copied, and the tables that say
where experts are change with their weights. A step waits for the host's part of this work, so each step does only a
small piece of it.
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from engine.balance.config import BalanceConfig
from engine.balance.looks import next_look, tells_enough
from engine.balance.moves import Move, moves
from engine.balance.placement import ExpertPlacement, balancing, imbalance, imbalances
from engine.balance.placements import grouping_of
from engine.balance.report import BalanceReport
from engine.exchange.interface import RankExchange
from engine.model.expert_slots import BalancedLayer
from engine.model.model import Model
from engine.parallel.layout import Group
from kernels.host_copy import HostCopies

_log = logging.getLogger("deepmesh.engine")

# Weight of what was counted before against what was counted since.
DECAY = 0.5
# After this many steps counts have certainly reached the host: at most two steps are in flight.
LOOK_STEPS = 4
# How many pieces of planning are done between two steps; they take 0.1 to 0.2 ms.
PIECES = 8


class Balancer:
    """Attributes:
    report: None before the first look.
    """

    def __init__(
        self, layers: Mapping[int, BalancedLayer], exchange: RankExchange, config: BalanceConfig, groups: int
    ) -> None:
        """Called by all ranks at once. layers: those whose experts may move, by their index in the model; groups: of
        the experts among which a token chooses, `ModelConfig.n_group`.
        """
        assert isinstance(config.interval_steps, int)
        # The layers' indices in the model; elsewhere in this class they are numbered from 0.
        self._indices = list(layers)
        self._layers = list(layers.values())
        self._exchange = exchange
        self._grouping = grouping_of(config, exchange.place.layout, groups)
        self._interval = config.interval_steps
        self._threshold = config.threshold
        self._file = config.placement_file
        self._steps = 0
        # The steps at which counts are sent to the host next, and at which they are read.
        self._next_count = next_look(0, config.interval_steps)
        self._next_look = 0
        self._moved = 0
        # [layers, slots]: the expert that each slot holds.
        self._held = np.array([layer.slots.placement.experts for layer in self._layers])
        # [layers, experts]: the sums of all ranks when last read. They begin with what steps for measuring and warming
        # up have counted, whose tokens no request asked for, so that these do not weigh.
        self._counts = _read(HostCopies([self._sums()]))
        self._loads = np.zeros(self._counts.shape)
        self._counted: HostCopies | None = None
        self._to_plan: deque[int] = deque()
        self._planning: tuple[int, Iterator[ExpertPlacement | None]] | None = None
        self._moving: tuple[int, Iterator[Move]] | None = None
        self._unsaved = False
        self.report: BalanceReport | None = None

    def before_step(self) -> None:
        """Every rank calls it before each of its steps; what it queues on the device is done before the step begins."""
        self._steps += 1
        if self._moving is not None:
            self._move(*self._moving)
        elif self._planning is not None:
            self._plan(*self._planning)
        elif self._to_plan:
            layer = self._to_plan.popleft()
            self._plan(layer, balancing(self._layers[layer].slots.placement, self._loads[layer], self._grouping))
        elif self._counted is not None and self._steps == self._next_look:
            self._look(self._counted)
        elif self._unsaved:
            self._save()
        if self._steps == self._next_count:
            self._next_count = next_look(self._steps, self._interval)
            if not (self._moving or self._planning or self._to_plan):
                self._counted, self._next_look = HostCopies([self._sums()]), self._steps + LOOK_STEPS

    def _sums(self) -> torch.Tensor:
        """[layers, experts] int64: how often tokens of all ranks have chosen each expert so far."""
        return self._exchange.all_reduce(torch.stack([layer.slots.chosen for layer in self._layers]), Group.WORLD)

    def _look(self, counted: HostCopies) -> None:
        self._counted = None
        counts = _read(counted)
        if not tells_enough(counts - self._counts, self._steps, self._interval):
            return
        self._loads *= DECAY
        self._loads += counts - self._counts
        self._counts = counts
        found = imbalances(self._held, self._layers[0].slots.placement.parts, self._loads)
        self.report = BalanceReport(float(found.mean()), float(found.max()), self._moved)
        # The most uneven layer first, since each move takes a step.
        uneven = np.argsort(-found, kind="stable")
        self._to_plan.extend(layer for layer in uneven.tolist() if found[layer] > self._threshold)

    def _plan(self, layer: int, planning: Iterator[ExpertPlacement | None]) -> None:
        *_, target = islice(planning, PIECES)
        self._planning = (layer, planning) if target is None else None
        if target is None:
            return
        placement, loads = self._layers[layer].slots.placement, self._loads[layer]
        before, after = imbalance(placement, loads), imbalance(target, loads)
        if before - after > self._threshold:
            self._moving = layer, moves(placement, target, self._exchange.place.layout.hosts_of_parts)
            fields = {"layer": self._indices[layer], "imbalance": round(before, 3), "expected": round(after, 3)}
            _log.info("experts move between ranks", extra={"fields": fields})

    def _move(self, layer: int, moving: Iterator[Move]) -> None:
        move = next(moving, None)
        if move is None:
            self._moving = None
            return
        self._copy(self._layers[layer], move)
        # A kernel may load weights before it waits for earlier kernels, but not before this copy to the device ends.
        self._layers[layer].slots.publish(move.placement)
        self._held[layer] = move.placement.experts
        self._moved += len(move.sources)
        assert self.report is not None
        self.report = replace(self.report, moved=self._moved)
        self._unsaved = self._file is not None

    def _copy(self, layer: BalancedLayer, move: Move) -> None:
        """Queue the copies. A rank gets its part of an expert's width from the rank that has the same part."""
        layout, slots = self._exchange.place.layout, layer.slots.placement.slots
        sources = list(range(layout.world))
        # Each part of the experts gives one slot, or gets one, or both.
        own = 0
        for pair in move.sources:
            (to, _), (source, _) = places = [divmod(slot, slots) for slot in pair]
            own = dict(places).get(layer.slots.part, own)
            for width in range(layout.width_parts):
                sources[to * layout.width_parts + width] = source * layout.width_parts + width
        self._exchange.copy_between([tensor[own : own + 1] for tensor in layer.weights], Group.WORLD, sources)

    def _save(self) -> None:
        self._unsaved = False
        if self._file is not None and self._exchange.place.rank == 0:
            held = [layer.slots.placement.experts for layer in self._layers]
            save_placements(self._file, dict(zip(self._indices, held, strict=True)))


def _read(counted: HostCopies) -> npt.NDArray[np.int64]:
    """A copy in ordinary memory, so that the pinned memory, which is slow to get, can hold the next counts."""
    counts: npt.NDArray[np.int64] = counted.read()[0].numpy().copy()
    return counts


def save_placements(path: Path, experts: Mapping[int, Sequence[int]]) -> None:
    """Write the file whole or not at all, even if another worker writes it at the same time. If the folder takes no
    files, nothing is kept, and the experts go on serving where they are.
    """
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as written:
            # The module json takes 6 ms for 58 layers, this 0.1.
            written.write(msgspec.json.encode(experts))
        Path(written.name).replace(path)
    except OSError as error:
        fields = {"path": str(path), "error": str(error)}
        _log.warning("the placement of experts was not saved", extra={"fields": fields})


def balancer_of(model: Model, exchange: RankExchange | None, config: BalanceConfig) -> Balancer | None:
    """The model's balancer; None if its experts stay where they are."""
    if exchange is None or config.interval_steps is None:
        return None
    layers = model.balanced_layers()
    return Balancer(layers, exchange, config, model.config.n_group) if layers else None
