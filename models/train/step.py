"""One step of training: losses, gradients, updates. On a GPU the whole step is one CUDA graph, except with indexers."""

import torch

from models.train.batch import Batch
from models.train.device_batch import DeviceBatch
from models.train.model import TinyModel
from models.train.optimizers import Optimizers
from models.train.recipe import Recipe

# Steps that run eagerly before the capture: they compile kernels and make the optimizers' state.
STEPS_BEFORE_CAPTURE = 3


class TrainingStep:
    """Steps over batches of one shape. It sums measurements on the device; `read_sums` reads and clears the sums.

    Launched kernel by kernel, a step of this model would spend half of its time waiting for Python.
    """

    def __init__(self, model: TinyModel, optimizers: Optimizers, recipe: Recipe) -> None:
        self.model = model
        self.optimizers = optimizers
        self.recipe = recipe
        self.device = model.cosine.device
        # Steps with indexers spend their time in few large kernels, and would take minutes to compile.
        captured = self.device.type == "cuda" and model.config.indexer is None
        self.losses = torch.compile(model.losses, dynamic=False) if captured else model.losses
        self.steps = 0
        self.batch: DeviceBatch | None = None
        self.graph = torch.cuda.CUDAGraph() if captured else None
        # Sums of both losses and the indexers', and of every expert's load.
        self.loss_sum = torch.zeros(3, device=self.device)
        self.load_sum = torch.zeros(len(model.gates()), model.config.n_routed_experts, device=self.device)

    @property
    def warm(self) -> bool:
        """Whether everything has been compiled and captured."""
        return self.steps > STEPS_BEFORE_CAPTURE

    def __call__(self, batch: Batch, progress: float) -> None:
        self.optimizers.set_rates(progress)
        if self.batch is None:
            self.batch = DeviceBatch.of(batch, self.device)
        else:
            self.batch.overwrite(batch)
        if self.graph is None or self.steps < STEPS_BEFORE_CAPTURE:
            self._compute(self.batch)
        else:
            if self.steps == STEPS_BEFORE_CAPTURE:
                # With "thread_local" the capture restricts this thread alone; others may call CUDA meanwhile.
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self._compute(self.batch)
            self.graph.replay()
        self.steps += 1

    def _compute(self, batch: DeviceBatch) -> None:
        losses = self.losses(batch)
        (losses.next_token + self.recipe.second_token_weight * losses.second_token + losses.index).backward()
        self.optimizers.step()
        for gate, load in zip(self.model.gates(), losses.load, strict=True):
            gate.balance(load, self.optimizers.balance_speed)
        self.loss_sum += torch.stack((losses.next_token, losses.second_token, losses.index)).detach()
        self.load_sum += losses.load

    def read_sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums since the last call, on the host; waits for the device."""
        sums = self.loss_sum.to("cpu", copy=True), self.load_sum.to("cpu", copy=True)
        self.loss_sum.zero_()
        self.load_sum.zero_()
        return sums
