"""Answers to JSONSchemaBench's schemas: `make check-schemas` with JSON_SCHEMA_BENCH naming a checkout of it.

The model has random weights, so that nothing but the masks makes its answers JSON. It is drawn to what closes a value,
or most answers would not end.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.protocol.messages import Submit
from gateway.forms.answer_forms import JsonForm
from mesh.domain.constraints import MAX_GRAMMAR_CHARACTERS, Constraint
from mesh.domain.outputs import FinishReason
from mesh.domain.sampling import Sampling
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.constrained import ConstrainedEngine, Texts
from tests.support.engines import submit_of

jsonschema = pytest.importorskip("jsonschema", reason="part of the extra 'conformance'")
pytestmark = pytest.mark.check("schemas")
# https://github.com/guidance-ai/jsonschemabench
CORPUS = os.environ.get("JSON_SCHEMA_BENCH")
SCHEMAS = 1000
TOGETHER = 50
TOKENS = 400
CLOSING = ('"', "}", "]", ",", ":", "0")


def corpus() -> Iterator[dict[str, Any]]:
    if CORPUS is None:
        pytest.skip("JSON_SCHEMA_BENCH names no checkout of guidance-ai/jsonschemabench")
    paths = sorted(Path(CORPUS).glob("data/**/*.json"))
    Random(0).shuffle(paths)
    for path in paths[:SCHEMAS]:
        yield json.loads(path.read_text())


def submit(key: int, schema: dict[str, Any], bias: dict[int, float]) -> Submit | None:
    grammar = "start: " + JsonForm(schema, "schema").rule()
    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        return None
    sampling = Sampling(temperature=0.8, seed=key, logit_bias=bias)
    return submit_of(key, random_prompt(8, seed=key), TOKENS, sampling=sampling, constraint=Constraint(grammar))


def test_every_answer_that_ends_is_valid(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    texts = Texts(checkpoint)
    bias = {token_id: 5.0 for text in CLOSING for token_id in texts.ids(text)}
    schemas = list(corpus())
    counts, wrong = Counter[str](), list[str]()
    engine = ConstrainedEngine(checkpoint, max_requests=TOGETHER, total_blocks=TOGETHER * 8)
    for first in range(0, len(schemas), TOGETHER):
        submits = [submit(key, schemas[key], bias) for key in range(first, min(first + TOGETHER, len(schemas)))]
        counts["too large"] += submits.count(None)
        transcript = engine.run(*(each for each in submits if each is not None))
        for key, end in transcript.ends.items():
            if end.refusal is not None:
                counts["compiling" if "compiled" in end.refusal.message else "following"] += 1
            elif end.finish is FinishReason.LENGTH:
                counts["cut off"] += 1
            else:
                counts["ended"] += 1
                wrong += _complaint(schemas[key], texts.of(transcript.token_ids[key]))
    sys.stdout.write(f"{dict(counts)}\n")
    assert sum(counts.values()) == len(schemas)
    assert counts["ended"] > len(schemas) / 4
    assert not wrong


def _complaint(schema: dict[str, Any], answer: str) -> list[str]:
    try:
        jsonschema.validate(json.loads(answer), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return [f"{answer[:200]}: {str(error)[:200]}"]
    return []
