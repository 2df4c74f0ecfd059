import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backend import execute as execute_batch
from engine.batch import Batch, Row
from engine.config import EngineConfig
from engine.memory.memory_plan import LIBRARY_BYTES, affordable_blocks, left_of_share, transfer_bytes
from engine.memory.pool_plan import device_state
from engine.memory.room import check_room
from engine.model.context import DeviceState
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from engine.step.shape import StepShape, shape_of
from mesh.domain.sampling import Sampling
from mesh.errors import CheckpointError, ConfigError
from mesh.start_times import StartTimes
from tests.support.checkpoints import execute, generate, model_backend, random_prompt, tiny_checkpoint
from transfer.config import TransferConfig

GIB = 1 << 30


def test_a_backend_reports_what_it_serves(tmp_path: Path) -> None:
    backend = model_backend(tiny_checkpoint(tmp_path / "mini"), total_blocks=100)
    assert (backend.model, backend.vocabulary_size, backend.total_blocks) == ("mini", 320, 100)
    assert (backend.context_tokens, backend.eos_token_ids) == (4096, frozenset({1}))
    assert (backend.namespace.layers, backend.namespace.dtype) == (3, "float32")


def test_a_start_says_what_each_phase_took_in_order(tmp_path: Path) -> None:
    config = EngineConfig(model_dir=tiny_checkpoint(tmp_path), device="cpu", total_blocks=64)
    times = StartTimes()
    ModelBackend(resolve(config, Hardware(0, GIB)), times=times)
    phases = "weights first-runs memory micro-batches graphs largest-steps fingerprint warm-up speed"
    assert list(times.seconds) == phases.split()


def test_a_configured_name_and_context_win(tmp_path: Path) -> None:
    backend = model_backend(tiny_checkpoint(tmp_path), model_name="chat", context_tokens=1000)
    assert (backend.model, backend.context_tokens) == ("chat", 1000)


def test_the_context_is_never_longer_than_the_pool(tmp_path: Path) -> None:
    assert model_backend(tiny_checkpoint(tmp_path), total_blocks=3).context_tokens == 192


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match="unsupported architecture LlamaForCausalLM"):
        model_backend(tmp_path)


def test_a_bfloat16_model_generates(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, dtype="bfloat16")
    prompt = random_prompt(100)
    exact = generate(model_backend(checkpoint), prompt, 1, [0, 1])
    assert generate(model_backend(checkpoint, dtype="bfloat16"), prompt, 1, [0, 1]) == exact


def test_experts_compute_a_prompt_in_chunks_as_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, prompt = model_backend(tiny_checkpoint(tmp_path)), random_prompt(60)
    whole = first_logprobs(backend, prompt, 60)
    monkeypatch.setattr("engine.model.moe.CHUNK_TOKENS", 16)
    assert torch.allclose(first_logprobs(backend, prompt, 60), whole, atol=1e-4)


def first_logprobs(backend: ModelBackend, prompt: list[int], chunk: int) -> torch.Tensor:
    """The log probability of every token of the vocabulary after the prompt, which is computed in chunks."""
    for start in range(0, len(prompt) - chunk, chunk):
        execute(backend, Row(prompt[start : start + chunk], start, [3, 1], None))
    last = Row(prompt[-chunk:], len(prompt) - chunk, [3, 1], Sampling(top_logprobs=backend.vocabulary_size))
    (sample,) = execute(backend, last)
    assert sample is not None and sample.logprobs is not None
    found = torch.empty(backend.vocabulary_size)
    found[sample.logprobs[0].top_token_ids] = torch.tensor(sample.logprobs[0].top_logprobs)
    return found


@pytest.mark.parametrize("chunk", [1, 50])
def test_a_compressed_pool_has_other_answers_and_another_namespace(tmp_path: Path, chunk: int) -> None:
    checkpoint, prompt = tiny_checkpoint(tmp_path), random_prompt(100)
    exact, compressed = model_backend(checkpoint), model_backend(checkpoint, kv_dtype="float8_e4m3fn")
    expected, found = (first_logprobs(backend, prompt, chunk) for backend in (exact, compressed))
    assert 1e-5 < (found - expected).norm() / expected.norm() < 0.05
    assert compressed.namespace.dtype == "float8_e4m3fn"
    assert exact.namespace != compressed.namespace


def test_a_compressed_pool_holds_more_blocks_in_the_same_memory(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    limited = {"total_blocks": None, "kv_memory_fraction": 1e-4}
    exact, compressed = (
        model_backend(checkpoint, kv_dtype=kv_dtype, **limited).total_blocks for kv_dtype in ("auto", "float8_e4m3fn")
    )
    assert compressed == pytest.approx(4 * exact, rel=0.2)


def test_sampling_depends_on_seed_and_position_alone(tmp_path: Path) -> None:
    backend = model_backend(tiny_checkpoint(tmp_path))
    prompt = random_prompt(20)
    rows = [Row(prompt, 0, [block], Sampling(temperature=2.0, seed=seed)) for block, seed in enumerate([1, 2, 1, 3, 4])]
    together = [sample.token_ids[0] for sample in execute(backend, *rows) if sample is not None]
    alone = [sample.token_ids[0] for row in rows for sample in execute(backend, row) if sample is not None]
    assert together == alone
    assert together[0] == together[2] and len(set(together)) > 1


def test_a_greedy_row_among_sampled_ones_stays_greedy(tmp_path: Path) -> None:
    backend = model_backend(tiny_checkpoint(tmp_path))
    prompt = random_prompt(20)
    hot, cold = Row(prompt, 0, [0], Sampling(temperature=5.0, seed=9)), Row(prompt, 0, [1], Sampling())
    assert execute(backend, hot, cold)[1] == execute(backend, cold)[0]


def test_a_step_without_sampling_rows_draws_nothing(tmp_path: Path) -> None:
    backend = model_backend(tiny_checkpoint(tmp_path))
    assert execute(backend, Row(random_prompt(10), 0, [0], None)) == [None]


def test_the_thread_count_is_applied(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        model_backend(tiny_checkpoint(tmp_path), threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def blocks(**changes: int | None) -> int:
    defaults: dict[str, Any] = {
        "budget_bytes": 8 * GIB,
        "block_bytes": 1 << 20,
        "context_blocks": 64,
        "max_requests": 8,
        "cap_bytes": None,
    }
    return affordable_blocks(**(defaults | changes))


def test_the_pool_holds_all_requests_at_full_context() -> None:
    assert blocks() == 512


def test_the_pool_stays_within_its_budget() -> None:
    assert blocks(budget_bytes=100 << 20) == 100


def test_the_cap_limits_the_pool_but_not_below_one_context() -> None:
    assert blocks(cap_bytes=200 << 20) == 200
    assert blocks(cap_bytes=10 << 20) == 64


def test_a_too_large_pools_error_names_key_and_sizes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"total_blocks=4000000000 takes [\d,]+\.\d GB and \d+\.\d GB are free"):
        model_backend(tiny_checkpoint(tmp_path), total_blocks=4_000_000_000)
    check_room(100, 1 << 30, 100 << 30)
    with pytest.raises(ConfigError, match=r"takes 108\.4 GB and 107\.4 GB are free: lower it to 100,"):
        check_room(101, 1 << 30, 100 << 30)


def test_a_pool_of_less_than_two_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"raise engine\.kv_memory_fraction"):
        blocks(budget_bytes=1 << 20)


def test_a_backend_on_a_cpu_reports_each_written_layer(tmp_path: Path) -> None:
    backend = model_backend(tiny_checkpoint(tmp_path))
    memory = backend.kv_memory()
    seen: list[tuple[int, list[bool]]] = []

    def look(layers: int) -> None:
        staging = memory.allocate_staging(memory.piece_bytes)
        written = []
        for layer in range(memory.layers):
            memory.gather(layer, 1, [2], staging, b"key")
            written.append(bool(staging.any()))
        seen.append((layers, written))

    rows = [Row(random_prompt(64), 0, [2], None)]
    backend.launch(Batch(0, rows, look), shape_of(rows))
    assert seen == [(count, [layer < count for layer in range(3)]) for count in (1, 2, 3)]


def test_workers_that_share_a_gpu_stay_within_it_together() -> None:
    total, weights = 100 << 30, 20 << 30
    left = left_of_share(total, 0.25, taken_bytes=weights)
    assert 4 * (left + weights + LIBRARY_BYTES) == total
    assert left_of_share(total, 0.25, taken_bytes=weights * 2) == 0


def test_a_backend_logs_where_it_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deepmesh.engine"):
        model_backend(tiny_checkpoint(tmp_path), total_blocks=7)
    (record,) = [record for record in caplog.records if record.message == "model ready"]
    assert vars(record)["fields"] == {"device": "CPU", "dtype": "float32", "kv_dtype": "float32", "kv_blocks": 7}


def test_a_backend_serves_with_fewer_blocks_if_memory_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, prompt = tiny_checkpoint(tmp_path), random_prompt(20)
    expected = generate(model_backend(checkpoint), prompt, 3, [0])
    answers = iter([1, 0])
    monkeypatch.setattr("engine.runner.backend.lacking_bytes", lambda *_: next(answers))
    with caplog.at_level(logging.WARNING, logger="deepmesh.engine"):
        backend = model_backend(checkpoint, total_blocks=None)
    planned, blocks = (vars(caplog.records[0])["fields"][key] for key in ("planned", "blocks"))
    assert backend.total_blocks == blocks == planned - 1
    assert backend.state.kv_pool.shape[1] == blocks + 1
    assert generate(backend, prompt, 3, [0]) == expected


def test_a_pool_that_cannot_be_made_is_tried_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def lacking(model: Any, resolved: Any, blocks: int, longest: int) -> DeviceState:
        sizes.append(blocks)
        if len(sizes) < 3:
            raise torch.OutOfMemoryError("no memory")
        return device_state(model, resolved, blocks, longest)

    monkeypatch.setattr("engine.runner.backend.device_state", lacking)
    backend = model_backend(tiny_checkpoint(tmp_path), total_blocks=None)
    assert backend.total_blocks == sizes[2] < sizes[1] < sizes[0]


def test_transfers_reserve_their_slots_and_hashes() -> None:
    assert transfer_bytes(TransferConfig(slots=4, slot_bytes=1 << 20)) == 4 * ((1 << 20) + (1 << 10) * 64)
    assert transfer_bytes(None) == 0


@pytest.mark.parametrize("shape", [StepShape(1), StepShape(40), StepShape(40, decode_only=False)])
def test_a_dummy_step_writes_to_no_block_of_a_request(tmp_path: Path, shape: StepShape) -> None:
    backend = model_backend(tiny_checkpoint(tmp_path))
    with torch.inference_mode():
        backend.state.kv_pool.fill_(0.5)
    assert execute_batch(backend, Batch(0, ()), shape) == []
    written = (backend.state.kv_pool != 0.5).flatten(2).any(dim=2).any(dim=0)
    assert written.nonzero().flatten().tolist() == [backend.state.padding_block]


def test_a_step_padded_to_another_ranks_draws_the_same(tmp_path: Path) -> None:
    backend = model_backend(tiny_checkpoint(tmp_path))
    rows = [Row(random_prompt(length, seed=length), 0, [block], Sampling()) for block, length in enumerate((1, 30))]
    assert execute_batch(backend, Batch(0, rows), StepShape(50, decode_only=False)) == execute(backend, *rows)
