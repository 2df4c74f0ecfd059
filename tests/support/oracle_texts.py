"""Texts in the tokens of the oracle model, as a gateway sends and gets them."""

from typing import Any

from tests.support.fake_decode import FakeDecodeWorker, scripted
from tests.support.gateways import Mesh, model_texts


def spelled(text: str) -> list[int]:
    tokenizer = model_texts()["oracle"].tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text)


def answering(text: str, **fields: Any) -> FakeDecodeWorker:
    """A worker whose answer is this text."""
    return FakeDecodeWorker(next_token=scripted(spelled(text)), eos_token_id=1, **fields)


def prompt_of(mesh: Mesh) -> str:
    """The prompt of the request that the worker got last, as text."""
    tokenizer = model_texts()["oracle"].tokenizer
    assert tokenizer is not None
    return tokenizer.spell(list(mesh.worker.submissions[-1].token_ids))
