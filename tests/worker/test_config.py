import pytest

from mesh.config_values import validate
from mesh.errors import ConfigError
from transfer.block_macs import Authorship
from worker.config import KvAuthenticityConfig, WorkerConfig

WORKER = {"engine": {"backend": "oracle"}, "scheduler": "127.0.0.1:1"}
OLD, NEW = "the secret before", "the secret after"


def test_a_worker_signs_with_its_secret_and_accepts_others() -> None:
    config = validate(WorkerConfig, {**WORKER, "kv": {"secret": NEW, "accepted_secrets": [OLD]}}, "test")
    assert config.authorship("host:1") == Authorship(NEW.encode(), "host:1", (OLD.encode(),))
    assert validate(WorkerConfig, WORKER, "test").authorship("host:1") is None


@pytest.mark.parametrize(
    "values", [{"accepted_secrets": [OLD]}, {"secret": NEW, "accepted_secrets": ["too short"]}, {"secret": "too short"}]
)
def test_secrets_that_would_stop_nobody_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="secret") as refused:
        validate(KvAuthenticityConfig, values, "test")
    assert "too short" not in str(refused.value)
