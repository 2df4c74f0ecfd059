"""Moves experts between a worker's ranks while they serve, so that each has as much to do.

All ranks make the same calls between the same steps and decide alike from the same sums: nothing else is agreed on. A
move is queued on the device between two steps. So no token meets a slot that is half copied, and the tables that say
where experts are change with their weights.
"""

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from msgspec.structs import replace

from engine.balance.config import BalanceConfig
from engine.balance.moves import Move, moves
from engine.balance.placement import balanced, imbalance
from engine.balance.report import BalanceReport
from engine.exchange.interface import Exchange
from engine.model.expert_slots import BalancedLayer
from engine.parallel.layout import Group

_log = logging.getLogger("deepmesh.engine")

# Weight of what was counted before against what was counted since.
DECAY = 0.5
# Steps after which counts have certainly come to the host: at most two are on their way.
LOOK_STEPS = 4


class Balancer:
    """Attributes:
    report: None before the first look.
    """

    def __init__(self, layers: Mapping[int, BalancedLayer], exchange: Exchange, config: BalanceConfig) -> None:
        """layers: by their index, those whose experts may move."""
        assert config.interval_steps is not None
        self._layers = layers
        # Steps that measured or warmed up have counted, and nobody asked for their tokens.
        for layer in layers.values():
            layer.slots.take_chosen()
        self._exchange = exchange
        self._interval = config.interval_steps
        self._threshold = config.threshold
        self._file = config.placement_file
        self._steps = 0
        self._moved = 0
        # By layer and expert.
        self._loads: dict[int, list[float]] = {}
        self._counted: torch.Tensor | None = None
        self._to_plan: deque[int] = deque()
        self._moves: deque[tuple[int, Move]] = deque()
        self._unsaved = False
        self.report: BalanceReport | None = None

    def before_step(self) -> None:
        """Every rank calls it before each of its steps; what it queues on the device is done before the step begins."""
        self._steps += 1
        if self._moves:
            self._make(*self._moves.popleft())
        elif self._to_plan:
            self._plan(self._to_plan.popleft())
        elif self._counted is not None and self._steps % self._interval == LOOK_STEPS:
            self._look()
        elif self._unsaved:
            self._save()
        if self._steps % self._interval == 0 and not (self._moves or self._to_plan):
            self._count()

    def _count(self) -> None:
        """Queue the sums of all ranks' counts, and their copy to the host."""
        own = torch.stack([layer.slots.take_chosen() for layer in self._layers.values()])
        total = self._exchange.all_reduce(own, Group.WORLD)
        self._counted = torch.empty(total.shape, dtype=total.dtype, pin_memory=total.is_cuda)
        self._counted.copy_(total, non_blocking=True)
        self._event = torch.cuda.Event() if total.is_cuda else None
        if self._event is not None:
            self._event.record()

    def _look(self) -> None:
        assert self._counted is not None
        if self._event is not None:
            self._event.synchronize()
        counted, self._counted = self._counted.tolist(), None
        for index, counts in zip(self._layers, counted, strict=True):
            before = self._loads.get(index, [0.0] * len(counts))
            self._loads[index] = [DECAY * old + new for old, new in zip(before, counts, strict=True)]
        found = [imbalance(layer.slots.placement, self._loads[index]) for index, layer in self._layers.items()]
        self.report = BalanceReport(sum(found) / len(found), max(found), self._moved)
        self._to_plan.extend(self._layers)

    def _plan(self, index: int) -> None:
        placement, loads = self._layers[index].slots.placement, self._loads[index]
        before = imbalance(placement, loads)
        if before <= self._threshold:
            return
        target = balanced(placement, loads)
        after = imbalance(target, loads)
        if before - after > self._threshold:
            made = [(index, move) for move in moves(placement, target)]
            self._moves.extend(made)
            fields = {"layer": index, "imbalance": round(before, 3), "expected": round(after, 3), "moves": len(made)}
            _log.info("experts move between ranks", extra={"fields": fields})

    def _make(self, index: int, move: Move) -> None:
        layer = self._layers[index]
        slots = layer.slots.placement.slots
        received = [(slot, list(self._sent(layer, source))) for slot, source in move.sources]
        for slot, contents in received:
            if slot // slots == layer.slots.part:
                for tensor, values in zip(layer.weights, contents, strict=True):
                    tensor[slot % slots].copy_(values)
        layer.slots.publish(move.placement)
        self._moved += len(received)
        assert self.report is not None
        self.report = replace(self.report, moved=self._moved)
        self._unsaved = self._file is not None

    def _sent(self, layer: BalancedLayer, source: int) -> Iterator[torch.Tensor]:
        """An expert's weights from the rank that has them, on every rank; of their width, what this one needs."""
        place, slots = self._exchange.place, layer.slots.placement.slots
        part, slot = divmod(source, slots)
        for tensor in layer.weights:
            # Not every operation takes numbers of one byte.
            given = tensor[slot : slot + 1].contiguous().view(torch.uint8)
            for width in range(place.layout.width_parts):
                values = self._exchange.broadcast(given, Group.WORLD, part * place.layout.width_parts + width)
                if width == place.width_part:
                    received = values
            yield received.view(tensor.dtype).view(tensor.shape[1:])

    def _save(self) -> None:
        self._unsaved = False
        if self._file is not None and self._exchange.place.rank == 0:
            save_placements(self._file, {index: layer.slots.placement.experts for index, layer in self._layers.items()})


def save_placements(path: Path, experts: Mapping[int, Sequence[int]]) -> None:
    """Whole or not at all, also if another worker writes the file at the same time. A folder that takes no files keeps
    nothing, and the experts serve on where they are.
    """
    try:
        with NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as written:
            json.dump({str(index): list(held) for index, held in experts.items()}, written)
        Path(written.name).replace(path)
    except OSError as error:
        fields = {"path": str(path), "error": str(error)}
        _log.warning("the placement of experts was not saved", extra={"fields": fields})
