"""Reports how many held-out problems the trained model solves, and how well indexers choose."""

import json
import logging
from typing import Any

from models.train.evaluate import (
    attention_recall,
    exact_match,
    exact_talks,
    inference_copy,
    long_problems,
    retrace,
    short_problems,
    talks,
    worked_out,
)
from models.train.trainer import EVALUATION_SEED, Trainer

log = logging.getLogger(__name__)

LONG_TOKENS = (1024, 2048, 4096, 8192, 15_000)


def report(trainer: Trainer, count: int) -> None:
    """Solve `count` held-out problems of each task with the FP8 weights, and half as many at each length; log the
    shares and write them, with the history, to results.json."""
    model = inference_copy(trainer.model)
    results = exact_match(model, trainer.tokenizer, short_problems(count, EVALUATION_SEED))
    for tokens in LONG_TOKENS:
        longer = long_problems(max(1, count // 2), tokens, trainer.characters_per_token, EVALUATION_SEED)
        results |= exact_match(model, trainer.tokenizer, longer)
    if trainer.recipe.checkup.talks:
        results |= exact_talks(model, trainer.tokenizer, talks(count, EVALUATION_SEED))
    for name, share in results.items():
        log.info("%-20s %.3f", name, share)
    _write(trainer, {"exact_match": results})


def report_choices(trainer: Trainer, count: int) -> None:
    """Log by length of the context which share of attention goes to the tokens that indexers choose, and of `count`
    held-out solutions of each short task, and a quarter as many of each long one at each length, the shares that are
    retraced with attention to all tokens and to those; and write them, with the history, to results.json.
    """
    model, shape = inference_copy(trainer.model), trainer.recipe.checkup.shape
    longer = [
        worked_out(long_problems(max(1, count // 4), tokens, trainer.characters_per_token, EVALUATION_SEED))
        for tokens in LONG_TOKENS
        if tokens < shape.longest
    ]
    recalls = {}
    model.select(False)
    for problems in longer:
        for name, examples in problems.items():
            recalls[name] = attention_recall(model, trainer.tokenizer, examples, shape)
            log.info("%-20s attention to the chosen %.4f, best %.4f, any %.4f", name, *recalls[name].mean(0).tolist())
    held_out = worked_out(short_problems(count, EVALUATION_SEED))
    for problems in longer:
        held_out |= problems
    retraced = {}
    for selects in (False, True):
        model.select(selects)
        retraced[selects] = retrace(model, trainer.tokenizer, held_out, shape).exact
    for name in held_out:
        shares = (each[name] for each in retraced.values())
        log.info("%-20s retraced %.3f with attention to all, %.3f to the chosen", name, *shares)
    _write(
        trainer,
        {
            "retraced": {"all": retraced[False], "chosen": retraced[True]},
            "recall": {name: values.tolist() for name, values in recalls.items()},
        },
    )


def _write(trainer: Trainer, results: dict[str, Any]) -> None:
    values = {**results, "history": trainer.history.to_json()}
    (trainer.directory / "results.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
