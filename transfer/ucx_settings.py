"""How UCX is configured for KV transfers."""

import os

from mesh.errors import ConfigError

_SETTINGS = {
    # On loopback TCP these carry four times as many bytes a second as UCX's own sizes.
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "1M",
    # Endpoints have error handling, with which UCX silently drops shared memory unless it is told this.
    "MM_ERROR_HANDLING": "y",
    # Within this time a killed sender is noticed over shared memory. UCX's own 20 s would keep slots that long.
    "KEEPALIVE_INTERVAL": "1s",
    # Without it the thread that connects waits for the answer, two minutes if the peer's machine is gone or cut off.
    # All transfers of this process stop meanwhile, and a rank whose transfer thread hangs is ended.
    "TCP_CONN_NB": "y",
}


def ucx_settings(transports: str | None, devices: str | None) -> dict[str, str]:
    """Settings for a UCX context. A UCX_* variable in the environment wins over each."""
    settings = dict(_SETTINGS)
    if transports is not None:
        settings["TLS"] = transports
    if devices is not None:
        settings["NET_DEVICES"] = devices
    return {name: value for name, value in settings.items() if f"UCX_{name}" not in os.environ}


def check_carries_gpu_memory(transports: str | None) -> None:
    """Raises ConfigError if these transports cannot read a GPU's memory: UCX would treat it as the host's."""
    chosen = os.environ.get("UCX_TLS", transports) or "all"
    names = set(chosen.removeprefix("^").split(","))
    reaching = names & {"cuda_copy", "cuda", "all"}
    if bool(reaching) == chosen.startswith("^"):
        raise ConfigError(
            f"KV on a GPU cannot be moved with the transports {chosen!r}: add cuda_copy, and cuda_ipc for GPUs of one"
            " host, or leave transfer.transports out"
        )
