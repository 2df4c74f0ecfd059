import pytest

from engine.config import EngineConfig
from engine.oracle.backend import OracleBackend
from engine.rank.__main__ import observed_at
from engine.rank.rank import make_agent
from mesh.config import ObserveConfig
from mesh.event_fd import EventFd
from mesh.start_times import StartTimes
from transfer import tuning
from transfer.config import TransferConfig
from transfer.host_memory import HostMemory


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_a_rank_with_kv_on_a_gpu_tunes_its_process(monkeypatch: pytest.MonkeyPatch, is_on_gpu: bool) -> None:
    tuned: list[None] = []
    monkeypatch.setattr(tuning, "tune_for_gpu_transfers", lambda: tuned.append(None))
    monkeypatch.setattr(HostMemory, "is_on_gpu", is_on_gpu)
    config = EngineConfig(backend="oracle", transfer=TransferConfig())
    times = StartTimes()
    agent = make_agent(config, None, OracleBackend(config), EventFd(), 0, times)
    assert agent is not None
    agent.close()
    assert len(tuned) == is_on_gpu
    assert list(times.seconds) == ["transfer-imports", "ucx", "first-slot", "slots"]


@pytest.mark.parametrize(
    ("place", "asked", "level"),
    [(0, "INFO", "INFO"), (1, "INFO", "WARNING"), (1, "DEBUG", "DEBUG"), (1, "ERROR", "ERROR")],
)
def test_ranks_do_not_all_tell_the_same(place: int, asked: str, level: str) -> None:
    assert observed_at(place, ObserveConfig.model_validate({"log_level": asked})).log_level == level
