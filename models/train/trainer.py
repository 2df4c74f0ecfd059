"""The training loop: stages by share of the time, resumed from the last saved state."""

import logging
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.model.config import parse_model_config
from eval.library_text import library_entries
from mesh.text.tokenizer_file import read_tokenizer
from models.train.evaluate import inference_copy, long_problems, retrace, short_problems, talks, worked_out
from models.train.feeder import Feeder
from models.train.history import Evaluation, History, Point, plot
from models.train.mixture import ExampleStream
from models.train.model import TinyModel
from models.train.optimizers import Optimizers
from models.train.packing import BatchSource, measure_characters_per_token
from models.train.precision import working_dtype
from models.train.recipe import Recipe, Stage
from models.train.restore import restore
from models.train.step import TrainingStep
from models.train.vocabulary import train_tokenizer

log = logging.getLogger(__name__)

SECONDS_BETWEEN_POINTS = 10.0
# Share of the training time between two evaluations.
EVALUATION_INTERVAL = 0.1
# Seed of held-out problems; training's seeds count up from the recipe's.
EVALUATION_SEED = 1_000_003


class Trainer:
    """Owns the model, its optimizers and its measurements; `directory` keeps them between runs."""

    def __init__(
        self,
        recipe: Recipe,
        directory: Path,
        device: torch.device,
        minutes: float,
        workers: int,
        start: Path | None = None,
    ) -> None:
        """start: a checkpoint with its tokenizer to go on from, if there is no state yet; None begins from nothing."""
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        self.recipe = recipe
        self.directory = directory
        self.device = device
        self.total_seconds = minutes * 60
        self.workers = workers
        directory.mkdir(parents=True, exist_ok=True)
        self.library = library_entries()
        self.tokenizer = self._tokenizer(start)
        self.characters_per_token = measure_characters_per_token(self.tokenizer)
        checkup = recipe.checkup
        problems = short_problems(checkup.short_problems, EVALUATION_SEED)
        for tokens in checkup.long_tokens:
            problems |= long_problems(checkup.long_problems, tokens, self.characters_per_token, EVALUATION_SEED)
        self.held_out = worked_out(problems)
        if checkup.talks:
            self.held_out |= talks(checkup.talks, EVALUATION_SEED)
        self.model = TinyModel(parse_model_config(recipe.config), working_dtype(device)).to(device)
        if start is not None:
            restore(self.model, start)
        self.optimizers = Optimizers(self.model, recipe)
        self.history = History()
        self.seconds = 0.0
        self.step = 0
        self._load()

    @property
    def progress(self) -> float:
        """Share of the training time that has passed."""
        return self.seconds / self.total_seconds

    @property
    def state_path(self) -> Path:
        return self.directory / "state.pt"

    def train(self, last_stage: str, deadline: float) -> bool:
        """Train to the end of `last_stage`, or until time.monotonic() reaches `deadline`, and save the state.

        Returns whether the stage was finished.
        """
        end = 0.0
        for stage in self.recipe.stages:
            end += stage.share
            if self.progress < end and not self._train_stage(stage, end, deadline):
                return False
            if stage.name == last_stage:
                break
        return True

    def _train_stage(self, stage: Stage, end: float, deadline: float) -> bool:
        log.info("stage %s from %.0f s on", stage.name, self.seconds)
        if stage.fp8:
            self.model.simulate_fp8()
        if stage.indexers is not None:
            self.model.train_indexers(alone=stage.indexers == "alone")
        step = TrainingStep(self.model, self.optimizers, self.recipe)
        meter = Meter(self, stage, step)
        evaluate_at = self.progress + EVALUATION_INTERVAL
        with Feeder(self._source(stage), self.workers) as batches:
            for batch in batches:
                step(batch, self.progress)
                self.step += 1
                if not step.warm:
                    meter.restart()
                    log.info("step %d, before the clock starts", self.step)
                self.seconds = meter.seconds()
                meter.record_if_due()
                if self.progress >= end or time.monotonic() > deadline:
                    break
                if self.progress >= evaluate_at:
                    meter.record()
                    self.evaluate()
                    evaluate_at += EVALUATION_INTERVAL
                    meter.restart()
        meter.record()
        finished = self.progress >= end
        if finished:
            self.evaluate()
        self.save()
        return finished

    def _source(self, stage: Stage) -> BatchSource:
        return BatchSource(
            self.tokenizer,
            self.library,
            self.characters_per_token,
            stage.mixture,
            stage.shape,
            # Adding the step gives a resumed run new problems.
            seed=self.recipe.seed + self.step,
        )

    def evaluate(self) -> None:
        """Retrace held-out problems, and log and keep the shares. Models with indexers attend to what they choose."""
        model = inference_copy(self.model)
        model.select(model.config.indexer is not None)
        retraced = retrace(model, self.tokenizer, self.held_out, self.recipe.checkup.shape)
        evaluation = Evaluation(self.step, self.seconds, dict(retraced.exact), retraced.draft_acceptance)
        self.history.evaluations.append(evaluation)
        shares = " ".join(f"{name}={share:.2f}" for name, share in evaluation.exact.items())
        log.info("retraced %s; drafts accepted %.3f", shares, evaluation.draft_acceptance)

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "history": self.history.to_json(),
            "seconds": self.seconds,
            "step": self.step,
        }
        temporary = self.state_path.with_suffix(".new")
        torch.save(state, temporary)
        temporary.replace(self.state_path)
        plot(self.history, self.directory / "loss.png")

    def _load(self) -> None:
        if not self.state_path.exists():
            return
        state = torch.load(self.state_path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])
        self.history = History.from_json(state["history"])
        self.seconds, self.step = state["seconds"], state["step"]
        log.info("resumed at step %d, %.0f s", self.step, self.seconds)

    def _tokenizer(self, start: Path | None) -> Tokenizer:
        if start is not None:
            return Tokenizer.from_str(read_tokenizer(start).decode())
        path = self.directory / "tokenizer.json"
        if not path.exists():
            stream = ExampleStream(self.recipe.stages[0].mixture, self.library, self.recipe.seed)
            train_tokenizer(stream, self.recipe.config["vocab_size"]).save(str(path))
        return Tokenizer.from_file(str(path))


class Meter:
    """Times training and records it in stretches. It waits for the device only at the end of a stretch."""

    def __init__(self, trainer: Trainer, stage: Stage, step: TrainingStep) -> None:
        self.trainer = trainer
        self.stage = stage
        self.step = step
        self.restart()

    def restart(self) -> None:
        """Begin a new stretch now. The time since the last record does not count."""
        self.step.read_sums()
        self.base_seconds = self.trainer.seconds
        self._begin()

    def _begin(self) -> None:
        self.began = time.monotonic()
        self.first_step = self.trainer.step

    def seconds(self) -> float:
        """Seconds of training in all."""
        return self.base_seconds + time.monotonic() - self.began

    def record_if_due(self) -> None:
        if time.monotonic() - self.began >= SECONDS_BETWEEN_POINTS:
            self.record()

    def record(self) -> None:
        """Record and log the stretch, and begin another."""
        trainer = self.trainer
        steps = trainer.step - self.first_step
        if not steps:
            return
        losses, load = self.step.read_sums()
        first, second, index = (losses / steps).tolist()
        imbalance = float((load.amax(1) / load.mean(1)).max())
        rate = steps * self.stage.shape.tokens / (time.monotonic() - self.began)
        self.base_seconds = self.seconds()
        point = Point(self.stage.name, trainer.step, self.base_seconds, first, second, rate, imbalance, index)
        trainer.history.points.append(point)
        self._begin()
        log.info(
            "%s step %d, %.0f s: loss %.4f, second %.4f, index %.3f, %.0f tokens/s, imbalance %.2f",
            point.stage,
            point.step,
            point.seconds,
            first,
            second,
            index,
            rate,
            imbalance,
        )
