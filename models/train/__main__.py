"""python -m models.train --stage all --minutes 20 --out DIR

With --start models/tiny-r1 a finished checkpoint goes on learning; with --indexers in addition it gets DeepSeek-V3.2's
indexers, and learns to attend to what they choose.
"""

import logging
import os
import time
from pathlib import Path
from typing import Annotated

import typer

log = logging.getLogger(__name__)


def main(
    out: Annotated[Path, typer.Option(help="keeps the state and takes the checkpoints")],
    stage: Annotated[str, typer.Option(help="the last stage to run, or all")] = "all",
    start: Annotated[
        Path | None,
        typer.Option(help="a checkpoint that learns tools and JSON; without one, training begins from nothing"),
    ] = None,
    indexers: Annotated[bool, typer.Option(help="whether --start gets indexers instead of learning tools")] = False,
    minutes: Annotated[float, typer.Option(help="of training in all, evaluation left out")] = 20.0,
    limit: Annotated[float, typer.Option(help="seconds after which this run stops; run again to go on")] = 86400.0,
    batch: Annotated[
        int | None, typer.Option(help="tokens of a step, if not the recipe's; longer documents are left out", min=2048)
    ] = None,
    problems: Annotated[int, typer.Option(help="per task, to be solved at the end")] = 64,
) -> None:
    """Train tiny-r1 and write it as FP8 and bfloat16 checkpoints."""
    # Worker processes import this file too; they start ten times faster without torch.
    import torch

    from models.train.export import export
    from models.train.recipe import INDEXED, MORE, RECIPE
    from models.train.report import report, report_choices
    from models.train.trainer import Trainer

    if indexers and start is None:
        raise typer.BadParameter(
            "only a finished checkpoint gets indexers: name it with --start", param_hint="--indexers"
        )
    recipe = RECIPE if start is None else INDEXED if indexers else MORE
    if batch is not None:
        recipe = recipe.in_batches_of(batch)
    names = [each.name for each in recipe.stages]
    if stage not in (*names, "all"):
        raise typer.BadParameter(f"choose one of {', '.join(names)}, all", param_hint="--stage")
    deadline = time.monotonic() + limit
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # Workers tokenize, each with one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(recipe, out, device, minutes, workers=max(1, (os.cpu_count() or 1) - 2), start=start)
    finished = trainer.train(names[-1] if stage == "all" else stage, deadline)
    for fp8 in (True, False):
        directory = out / ("fp8" if fp8 else "bf16")
        export(trainer.model, recipe.config, trainer.tokenizer, directory, fp8=fp8)
        log.info("wrote %s", directory)
    if not finished:
        log.info("stopped by --limit: run the same command again to go on")
    elif indexers:
        report_choices(trainer, problems)
    elif stage in (names[-1], "all"):
        report(trainer, problems)


if __name__ == "__main__":
    typer.run(main)
