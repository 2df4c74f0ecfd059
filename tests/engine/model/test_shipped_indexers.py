"""tiny-v32: tiny-r1 with indexers, trained to attend to what they choose."""

from pathlib import Path
from random import Random

import pytest

from engine.model.config import read_model_config
from eval.tasks import LONG_TASKS, draw_long, grade
from gateway.prompts.chat import find_chat_template
from gateway.prompts.tokenizer import load_tokenizer
from gateway.prompts.turns import ChatMessage
from tests.support.checkpoints import generate, model_backend
from tools.tokenizer_files import END

MODEL = Path(__file__).parents[3] / "models" / "tiny-v32"
MOST_TOKENS = 48


@pytest.mark.parametrize(("task", "characters"), [("needle", 4200), ("key_value", 1700)])
def test_facts_are_found_among_the_tokens_that_indexers_choose(task: str, characters: int) -> None:
    problem = draw_long(LONG_TASKS[task], Random(task), characters, held_out=True)
    tokenizer = load_tokenizer(MODEL)
    chat = find_chat_template(MODEL, tokenizer)
    assert chat is not None
    prompt = chat.render([ChatMessage("user", problem.prompt)]).token_ids
    indexer = read_model_config(MODEL).indexer
    assert indexer is not None and len(prompt) > 2 * indexer.top_k
    answer = generate(model_backend(MODEL), prompt, MOST_TOKENS, list(range(1, 64)))
    text = tokenizer.spell(answer).partition(END)[0]
    assert grade(problem, text), text
