"""The shipped model finds facts at every depth of long texts, with prompts computed sparsely.

`make check-needles` runs it. With `-s` pytest prints how much attention was kept, in which share of the blocks.
"""

import sys
import time
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from engine.config import EngineConfig, SparsePrefillConfig
from engine.engine import Engine
from engine.protocol.messages import SparseMeasure
from eval.tasks.prose import sentences
from gateway.prompts.chat import find_chat_template
from gateway.prompts.tokenizer import load_tokenizer
from gateway.prompts.turns import ChatMessage
from tests.support.checkpoints import model_backend
from tests.support.engines import Transcript, submit_of

MODEL = Path(__file__).parents[3] / "models" / "tiny-r1"
FROM_TOKENS = 512
DEPTHS = [tenth / 10 for tenth in range(11)]
CHARACTERS_A_TOKEN = 3.88

pytestmark = pytest.mark.check("needles")


def haystack(random: Random, tokens: int, depth: float) -> tuple[str, str]:
    """A question about a fact at this depth of a text, and its answer. There is another such fact."""
    lines = sentences(random, round((tokens - 100) * CHARACTERS_A_TOKEN))
    wanted, other = (str(random.randrange(10_000, 100_000)) for _ in range(2))
    lines.insert(random.randint(0, len(lines)), f"The access code of the yellow tomato is {other}.")
    lines.insert(round(depth * len(lines)), f"The access code of the hollow cabin is {wanted}.")
    return f"{' '.join(lines)}\n\nWhat is the access code of the hollow cabin?", wanted


@pytest.mark.parametrize("tokens", [2000, 8000])
@pytest.mark.parametrize("recall", [0.95, 0.8])
def test_facts_at_every_depth_are_found(tokens: int, recall: float) -> None:
    sparse = SparsePrefillConfig(recall=recall, from_tokens=FROM_TOKENS)
    settings: dict[str, Any] = {"total_blocks": 256, "sparse_prefill": sparse, "max_step_tokens": tokens // 4}
    backend = model_backend(MODEL, **settings)
    tokenizer = load_tokenizer(MODEL)
    chat = find_chat_template(MODEL, tokenizer)
    assert chat is not None
    measures: list[SparseMeasure] = []
    for depth in DEPTHS:
        question, wanted = haystack(Random(f"{tokens} {depth}"), tokens, depth)
        prompt = chat.render([ChatMessage("user", question)]).token_ids
        engine = Engine(EngineConfig(model_dir=MODEL, **settings), backend, time.monotonic)
        engine.submit(submit_of(0, prompt, 100, sparse=sparse.offered))
        transcript = Transcript().run(engine)
        assert wanted in tokenizer.spell(transcript.token_ids[0]), f"at {depth:.0%} of {len(prompt)} tokens"
        measures += [measure for step in transcript.steps for measure in step.sparse]
    kept, computed = ([getattr(each, name) for each in measures] for name in ("recall", "density"))
    figures = (tokens, recall, *(f(each) for each in (kept, computed) for f in (fmean, min, max)))
    sys.stdout.write("\n{} tokens, {}: kept {:.3f} ({:.3f} to {:.3f}) in {:.3f} ({:.3f} to {:.3f})\n".format(*figures))
    # The last queries keep the requested share of attention; earlier ones may keep less.
    assert fmean(kept) > recall - 0.1
