"""How a checkpoint wants its tokens drawn where a request says nothing: its generation_config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mesh.domain.sampling import Sampling, check_sampling
from mesh.errors import ConfigError, InvalidRequest

FILE = "generation_config.json"


class SamplingDefaults(msgspec.Struct, frozen=True):
    """The fields that are read, under the names of `Sampling`; None if the checkpoint does not say.

    `do_sample` is not among them: many checkpoints say false and mean nothing by it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def said(self) -> Mapping[str, Any]:
        named = msgspec.structs.asdict(self)
        return {name: value for name, value in named.items() if value is not None}


NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """A checkpoint without the file says nothing. Raises ConfigError if the file is malformed."""
    path = directory / FILE
    try:
        defaults = msgspec.json.decode(path.read_bytes(), type=SamplingDefaults)
        check_sampling(Sampling(**defaults.said), None)
    except FileNotFoundError:
        return NO_DEFAULTS
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    except InvalidRequest as error:
        raise ConfigError(f"{path}: {error.message}") from error
    return defaults
