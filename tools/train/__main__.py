"""python -m tools.train --stage all --minutes 20 --out DIR"""

import json
import logging
import os
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from tools.train.evaluate import exact_match, inference_copy, long_problems, short_problems
from tools.train.export import export
from tools.train.recipe import RECIPE
from tools.train.trainer import EVALUATION_SEED, Trainer

log = logging.getLogger(__name__)

STAGES = (*(stage.name for stage in RECIPE.stages), "all")


def main(
    out: Annotated[Path, typer.Option(help="keeps the state and takes the checkpoints")],
    stage: Annotated[str, typer.Option(help=f"the last stage to run: {', '.join(STAGES)}")] = "all",
    minutes: Annotated[float, typer.Option(help="of training in all, evaluation left out")] = 20.0,
    limit: Annotated[float, typer.Option(help="seconds after which this run stops; run again to go on")] = 86400.0,
    problems: Annotated[int, typer.Option(help="per task, to be solved at the end")] = 64,
) -> None:
    """Train tiny-r1 on one GPU and write it as FP8 and bfloat16 checkpoints."""
    if stage not in STAGES:
        raise typer.BadParameter(f"choose one of {', '.join(STAGES)}", param_hint="--stage")
    deadline = time.monotonic() + limit
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    # Workers tokenize, each with one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(RECIPE, out, device, minutes, workers=max(1, (os.cpu_count() or 1) - 2))
    last_stage = RECIPE.stages[-1].name if stage == "all" else stage
    if not trainer.train(last_stage, deadline):
        log.info("stopped by --limit: run the same command again to go on")
        return
    for fp8 in (True, False):
        directory = out / ("fp8" if fp8 else "bf16")
        export(trainer.model, RECIPE.config, trainer.tokenizer, directory, fp8=fp8)
        log.info("wrote %s", directory)
    if last_stage == RECIPE.stages[-1].name:
        _report(trainer, problems)


def _report(trainer: Trainer, count: int) -> None:
    """Solve held-out problems with the FP8 weights and write results.json."""
    model = inference_copy(trainer.model)
    results = exact_match(model, trainer.tokenizer, short_problems(count, EVALUATION_SEED))
    for tokens in (1024, 2048, 4096, 8192, 15_000):
        longer = long_problems(count // 2, tokens, trainer.characters_per_token, EVALUATION_SEED)
        results |= exact_match(model, trainer.tokenizer, longer)
    for name, share in results.items():
        log.info("%-20s %.3f", name, share)
    values = {"exact_match": results, "history": trainer.history.to_json()}
    (trainer.directory / "results.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
