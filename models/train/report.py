"""Reports how many held-out problems the trained model solves."""

import json
import logging

from models.train.evaluate import exact_match, exact_talks, inference_copy, long_problems, short_problems, talks
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
    values = {"exact_match": results, "history": trainer.history.to_json()}
    (trainer.directory / "results.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
