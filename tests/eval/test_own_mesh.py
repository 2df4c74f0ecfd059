import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from engine.scoring import token_logprobs as engine_logprobs
from eval.engine_scorer import token_logprobs
from eval.evaluation import evaluate
from eval.options import EvalOptions
from eval.own_mesh import files_digest
from eval.perplexity import Document
from gateway.prompts.tokenizer import load_tokenizer
from mesh.errors import CheckpointError, ProcessFailed
from tests.support.checkpoints import model_backend, tiny_checkpoint
from tests.support.forking import forked_services

DOCUMENTS = [Document("a", "A few words of held-out text."), Document("b", "More.")]


def options(directory: Path, out: Path) -> EvalOptions:
    return EvalOptions(
        model_dir=directory,
        out=out,
        problems=1,
        max_tokens=4,
        settings=("decode.engine.threads=1", "decode.engine.total_blocks=64"),
    )


def expected_nats(directory: Path) -> list[float]:
    tokenizer = load_tokenizer(directory)
    token_ids = [tokenizer.encode_prompt(document.text) for document in DOCUMENTS]
    return [-sum(each) for each in engine_logprobs(model_backend(directory), token_ids, most_rows=8)]


@pytest.mark.slow
async def test_a_checkpoint_is_served_asked_and_scored_once(tmp_path: Path) -> None:
    directory, out = tiny_checkpoint(tmp_path / "model"), tmp_path / "out"
    with forked_services():
        first = await evaluate(options(directory, out), DOCUMENTS, Console(file=io.StringIO()))
    assert (first.model, first.scores[-1].total, first.scores[-1].refused) == ("model", 15, 0)
    assert all(0 < outcome.answer_tokens <= 4 for outcome in first.outcomes)
    assert [score.negative_log_likelihood for score in first.documents] == pytest.approx(expected_nats(directory))
    assert first.perplexity is not None and first.perplexity.documents == 2
    (out / "mesh.log").unlink()
    assert await evaluate(options(directory, out), DOCUMENTS, Console(file=io.StringIO())) == first
    assert not (out / "mesh.log").exists()


async def test_a_scorer_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    settings = [f"engine.model_dir={json.dumps(str(tmp_path / 'absent'))}"]
    with forked_services(), pytest.raises(ProcessFailed, match=r"scoring held-out text ended with status 2: .*absent"):
        await token_logprobs([[1, 2]], settings, tmp_path)


async def test_a_missing_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no directory"):
        await evaluate(options(tmp_path / "absent", tmp_path / "out"), [], Console(file=io.StringIO()))


def test_a_checkpoint_that_was_written_anew_is_another(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shard = tmp_path / "model/model.safetensors"
    shard.write_bytes(b"first")
    first = files_digest(tmp_path / "model")
    assert files_digest(tmp_path / "model") == first
    shard.write_bytes(b"other weights")
    assert files_digest(tmp_path / "model") != first
