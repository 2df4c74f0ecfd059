"""How UCX is configured for KV transfers."""

import os

from mesh.errors import ConfigError

_SETTINGS = {
    # With these sizes loopback TCP carries four times as many bytes a second as with UCX's defaults.
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "1M",
    # Our endpoints use error handling. With it, UCX silently drops shared memory unless this is set.
    "MM_ERROR_HANDLING": "y",
    # A killed sender is noticed within this time over shared memory. With UCX's default of 20 s it would hold slots
    # that long.
    "KEEPALIVE_INTERVAL": "1s",
    # Without this, the connecting thread waits for the answer: two minutes if the peer's machine is gone or cut off.
    # All transfers of this process stop meanwhile, and a rank whose transfer thread hangs is ended.
    "TCP_CONN_NB": "y",
}


def ucx_settings(transports: str | None, devices: str | None) -> dict[str, str]:
    """Settings for a UCX context. A UCX_* variable in the environment overrides each."""
    settings = dict(_SETTINGS)
    if transports is not None:
        settings["TLS"] = transports
    if devices is not None:
        settings["NET_DEVICES"] = devices
    return {name: value for name, value in settings.items() if f"UCX_{name}" not in os.environ}


def chooses_transports(transports: str | None) -> bool:
    """Whether UCX chooses among all transports."""
    return transports is None and "UCX_TLS" not in os.environ


def check_carries_gpu_memory(transports: str | None) -> None:
    """Raises ConfigError if these transports cannot read a GPU's memory: UCX would treat it as host memory."""
    chosen = os.environ.get("UCX_TLS", transports) or "all"
    names = set(chosen.removeprefix("^").split(","))
    reaching = names & {"cuda_copy", "cuda", "all"}
    if bool(reaching) == chosen.startswith("^"):
        raise ConfigError(
            f"KV on a GPU cannot be moved with the transports {chosen!r}: add cuda_copy, and cuda_ipc for GPUs of one"
            " host, or leave transfer.transports out"
        )
