import pytest

from transfer.ucx_settings import ucx_settings


def test_the_environment_of_the_user_stays_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "8K")
    settings = ucx_settings("posix", None)
    assert "TLS" not in settings and "TCP_TX_SEG_SIZE" not in settings
    assert settings["MM_ERROR_HANDLING"] == "y"
