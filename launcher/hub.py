"""Finds a model by what `--model` says: a folder, or the id of a model on the Hugging Face Hub.

A model of the Hub is taken from its local cache (`HF_HUB_CACHE`, `HF_HOME`), or downloaded to it if that lacks files.
With `HF_HUB_OFFLINE=1` nothing is asked of the network. `HF_ENDPOINT` names another Hub, `HF_TOKEN` who asks.
"""

import re
from pathlib import Path

from engine.weights.headers import shard_files, weight_map
from mesh.errors import CheckpointError

# ORGANISATION/NAME, as the Hub allows them.
_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
# What a model is served from. Other formats of the same weights, which some repositories have too, are left out.
DESCRIPTION = ("config.json", "generation_config.json", "hf_quant_config.json", "quant_cfg.json")
FILES = ("*.json", "*.jinja", "tiktoken.model", "*.safetensors")


def find_model(name: str, *, weights: bool = True) -> Path:
    """The folder of the model; without `weights` that of its description. Raises CheckpointError if an id has none and
    none can be downloaded, or if the name is empty. What cannot be an id is a folder, which need not exist.
    """
    if not name:
        raise CheckpointError("the model's name is empty: give a folder, or ORGANISATION/NAME of the Hub")
    folder = Path(name)
    if folder.exists() or not _ID.fullmatch(name):
        return folder
    files = FILES if weights else DESCRIPTION
    cached = _cached(name, files)
    if cached is not None and (_is_complete(cached) if weights else (cached / "config.json").exists()):
        return cached
    return _download(name, files)


def served_name(model: str) -> str | None:
    """The name of a model of the Hub, whose folder is named after a commit; None for a folder, which has its own."""
    return model.rpartition("/")[2] if not Path(model).exists() and _ID.fullmatch(model) else None


def _cached(name: str, files: tuple[str, ...]) -> Path | None:
    # Imported here: it takes a tenth of a second, and most models are folders.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files), local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise CheckpointError(f"{name} is neither a folder nor an id of the Hub: {error}") from error


def _is_complete(folder: Path) -> bool:
    """Whether the cache has all weights. A download that was broken off leaves some out."""
    try:
        return all((folder / shard).exists() for shard in shard_files(weight_map(folder)))
    except CheckpointError:
        return False


def _download(name: str, files: tuple[str, ...]) -> Path:
    """Shows its progress on stderr, and continues where an earlier download was broken off."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    where = f"neither a folder nor whole in the Hub's cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"{name} is {where}, and HF_HUB_OFFLINE forbids to download it")
    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated: accept its terms on {constants.ENDPOINT}, then set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{name} is {where}, and {constants.ENDPOINT} has no such model") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name} is {where}, and cannot be downloaded ({reason}): run hf download {name} where the Hub can be"
            " reached, and give the folder, or set HF_ENDPOINT"
        ) from error
