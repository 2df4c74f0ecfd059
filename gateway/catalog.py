"""The models that clients can ask for: what workers serve, with tokenizers and chat templates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.config import ModelConfig
from gateway.links.workers import WorkerDirectory
from gateway.prompts.chat import ChatTemplate, find_chat_template
from gateway.prompts.tokenizer import Tokenizer, load_tokenizer
from gateway.requests import ModelLimits
from gateway.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.errors import InvalidRequest, MeshError, NoWorker, UnknownModel
from mesh.memory.freed_memory import release_freed_memory

RETRY_AFTER_MS = 1000


@dataclass(frozen=True, slots=True)
class ModelText:
    """What turns a model's tokens into text. Without a tokenizer a model takes and gives token ids only; without a
    template it takes no chats.
    """

    tokenizer: Tokenizer | None = None
    chat: ChatTemplate | None = None
    # How tokens are drawn where a request says nothing.
    sampling: SamplingDefaults = NO_DEFAULTS


@dataclass(frozen=True, slots=True)
class ListedModel:
    name: str
    limits: ModelLimits
    # Workers that take requests for it now.
    workers: int
    sampling: SamplingDefaults = NO_DEFAULTS


class Catalog:
    def __init__(self, texts: Mapping[str, ModelText], directory: WorkerDirectory) -> None:
        self._texts = texts
        self._directory = directory

    def resolve(self, name: str) -> str:
        """The model that `name` means: its own, or its id on the Hub; empty means the only one. Raises UnknownModel,
        NoWorker or InvalidRequest.
        """
        known = sorted({*self._directory.models(), *self._texts})
        if not name:
            if len(known) > 1:
                raise InvalidRequest(f"name a model: this mesh serves {', '.join(known)}", field="model")
            if not known:
                raise NoWorker("no worker has joined yet: retry later", retry_after_ms=RETRY_AFTER_MS)
            return known[0]
        for served in _names(name):
            if served in known:
                return served
        raise UnknownModel(f"no model {name!r}: this mesh serves {', '.join(known) or 'none yet'}")

    def limits(self, name: str) -> ModelLimits:
        """Raises NoWorker if no worker of the model has joined yet, or all have left."""
        limits = self._directory.limits(name)
        if limits is None:
            raise NoWorker(f"no worker serves {name!r} yet: retry later", retry_after_ms=RETRY_AFTER_MS)
        return limits

    def sparse_prefill(self, name: str) -> SparsePrefill | None:
        """How the model's workers compute long prompts; None if some compute them exactly, or if they differ."""
        return self._directory.sparse_prefill(name)

    def text(self, name: str) -> ModelText:
        return self._texts.get(name, ModelText())

    def sampling_defaults(self, name: str) -> SamplingDefaults:
        """Those of the model that `name` means; none if there is no such model, for which other methods raise."""
        try:
            return self.text(self.resolve(name)).sampling
        except MeshError:
            return NO_DEFAULTS

    def listed(self) -> list[ListedModel]:
        """The models that a worker serves now."""
        models = [(name, self._directory.limits(name)) for name in self._directory.models()]
        listed = [
            ListedModel(name, limits, self._directory.serving(name), self.text(name).sampling)
            for name, limits in models
            if limits
        ]
        return [model for model in listed if model.workers]

    def find(self, name: str) -> ListedModel:
        """One of `listed`. Raises UnknownModel."""
        listed = {model.name: model for model in self.listed()}
        found = next((listed[each] for each in _names(name) if each in listed), None)
        if found is None:
            raise UnknownModel(f"no worker serves {name!r} now")
        return found


def _names(name: str) -> tuple[str, str]:
    """By what names a model may be served: its own, or of an id on the Hub, ORGANISATION/NAME, the name alone."""
    return name, name.rpartition("/")[2]


def load_texts(models: Sequence[ModelConfig], checkpoint_defaults: bool = True) -> dict[str, ModelText]:
    """Tokenizers and templates by served name. Raises ConfigError.

    checkpoint_defaults: whether generation_config.json counts.
    """
    texts = {}
    for model in models:
        tokenizer = load_tokenizer(model.tokenizer_dir)
        sampling = read_sampling_defaults(model.tokenizer_dir) if checkpoint_defaults else NO_DEFAULTS
        chat = find_chat_template(model.tokenizer_dir, tokenizer)
        texts[model.served_name] = ModelText(tokenizer, chat, sampling)
    release_freed_memory()
    return texts
