"""Says in one sentence why a path is no checkpoint that can be served."""

import re
from pathlib import Path

from mesh.domain.architectures import FAMILY
from mesh.errors import CheckpointError

SERVED = f"deepmesh serves directories with safetensors of {'; '.join(each.models for each in FAMILY)}"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def check_directory(path: Path) -> None:
    """Raises CheckpointError for what is no directory, and for one with weights in another format alone."""
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path} is GGUF: {SERVED}")
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file: {SERVED}")
    if not path.is_dir():
        name = str(path)
        how = f" (hf download {name} --local-dir DIR gets one)" if _HUB_ID.fullmatch(name) else ""
        raise CheckpointError(f"there is no directory {name}: {SERVED}{how}")
    if any(path.glob("*.safetensors*")):
        return
    for pattern, form in (("*.gguf", "GGUF"), ("*.bin", "PyTorch's format")):
        if any(path.glob(pattern)):
            raise CheckpointError(f"{path} has weights in {form}: {SERVED}")
