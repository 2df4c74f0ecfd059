"""What a worker's settings are chosen for, as options of commands."""

from typing import Annotated

import typer

from mesh.config_keys import did_you_mean
from mesh.errors import ConfigError

BALANCED = "balanced"
AIMS = (BALANCED, "throughput", "latency")

AimOption = Annotated[
    str,
    typer.Option(metavar="AIM", help="What settings are chosen for on GPUs: balanced, throughput or latency."),
]
ExactOption = Annotated[
    bool, typer.Option("--exact", help="Keep the number formats that the model was published with.")
]


def check_aim(aim: str) -> None:
    """Raises ConfigError for an aim that there is not."""
    if aim not in AIMS:
        raise ConfigError(f"--aim {aim}: expected {', '.join(AIMS[:-1])} or {AIMS[-1]}{did_you_mean(aim, AIMS)}")
