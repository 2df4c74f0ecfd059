import json
from pathlib import Path

import pytest
import torch

from capacity.shapes import SHAPES
from engine.config import EngineConfig
from engine.memory.full_gpu import full_gpu
from engine.memory.memory_plan import LIBRARY_BYTES
from mesh.errors import EngineFailed
from worker.ranks.client import RankClient


@pytest.mark.parametrize(
    ("free", "own", "told"),
    [(2, 5, "other processes hold 91.9 of its 100.0 GB, "), (1, 98, "this rank alone needs more than its 100.0 GB")],
    ids=["others", "itself"],
)
def test_the_error_tells_who_holds_a_full_gpu(free: int, own: int, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert round(LIBRARY_BYTES / 1e9, 1) == 1.1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * 10**9, 100 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: own * 10**9)
    assert told in full_gpu(torch.device("cuda")).message


@pytest.mark.gpu
async def test_a_gpu_that_another_process_holds_is_named(tmp_path: Path) -> None:
    # About 6 GB.
    shape = {**SHAPES["r1-ep8-rank"], "num_hidden_layers": 4, "num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(shape, default=dict))
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (3 << 30), dtype=torch.uint8, device="cuda")
    with pytest.raises(EngineFailed, match=r"the GPU is full: other processes hold [\d.,]+ of its [\d.,]+ GB") as told:
        await RankClient.start(EngineConfig(model_dir=tmp_path, random_weights=True, device="cuda"))
    assert "\n" not in told.value.message
    del held
    torch.cuda.empty_cache()
