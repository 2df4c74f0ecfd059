"""How tokens are drawn where a request says nothing: as the checkpoint's generation_config.json says."""

from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from gateway.catalog import ModelText, load_texts
from gateway.config import ModelConfig
from gateway.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from mesh.errors import ConfigError
from tests.support.gateways import MODEL, Mesh, chat_request, collect, model_texts, running_mesh
from tests.support.oracle_texts import answering
from tests.support.tokenizers import tokenizer_directory

R1 = '{"_from_model_config": true, "bos_token_id": 0, "do_sample": true, "temperature": 0.6, "top_p": 0.95}'
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completion": ("/v1/completions", {"prompt": "hi"}),
    "response": ("/v1/responses", {"input": "hi"}),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}),
}


def with_defaults(**said: Any) -> dict[str, ModelText]:
    return {MODEL: replace(model_texts()[MODEL], sampling=SamplingDefaults(**said))}


def drawn(mesh: Mesh) -> tuple[float, float, int]:
    sampling = mesh.worker.submissions[-1].sampling
    return round(sampling.temperature, 6), round(sampling.top_p, 6), sampling.top_k


async def test_an_unspecified_request_is_drawn_as_the_checkpoint_says() -> None:
    async with running_mesh(
        answering("ok<｜end▁of▁sentence｜>"), texts=with_defaults(temperature=0.6, top_p=0.95)
    ) as mesh:
        for route, body in ASKED.values():
            answer = await mesh.http.post(route, json=body)
            assert (answer.status_code, drawn(mesh)) == (200, (0.6, 0.95, 0)), route
            said = await mesh.http.post(route, json={**body, "temperature": 0, "top_k": 5})
            assert (said.status_code, drawn(mesh)) == (200, (0, 0.95, 5)), route
            if route == "/v1/responses":
                assert (answer.json()["temperature"], answer.json()["top_p"]) == (0.6, 0.95)
        await collect(mesh, chat_request())
        assert drawn(mesh) == (0.6, 0.95, 0)
        model = (await mesh.http.get("/v1/models")).json()["data"][0]
        assert model["sampling_defaults"] == {"temperature": 0.6, "top_p": 0.95}


async def test_without_defaults_of_a_checkpoint_the_apis_own_count() -> None:
    async with running_mesh(answering("ok<｜end▁of▁sentence｜>")) as mesh:
        for route, body in ASKED.values():
            await mesh.http.post(route, json=body)
            assert drawn(mesh) == (1, 1, 0)
        assert "sampling_defaults" not in (await mesh.http.get("/v1/models")).json()["data"][0]


@pytest.mark.parametrize("counts", [True, False])
def test_the_file_is_read_unless_it_is_not_to_count(tmp_path: Path, counts: bool) -> None:
    directory = copytree(tokenizer_directory(), tmp_path / "checkpoint")
    (directory / "generation_config.json").write_text(R1, encoding="utf-8")
    (text,) = load_texts([ModelConfig(tokenizer_dir=directory)], checkpoint_defaults=counts).values()
    assert text.sampling == (SamplingDefaults(temperature=0.6, top_p=0.95) if counts else NO_DEFAULTS)


@pytest.mark.parametrize("content", ["{", '{"temperature": -1}', '{"top_p": "high"}', "\xff"])
def test_a_malformed_file_fails_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_sampling_defaults(tmp_path)
