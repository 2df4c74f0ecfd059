"""A model over few of its layers launches what the whole model does, so that a start need not run all of them."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.context import ForwardContext
from engine.model.inputs import build_context
from engine.model.model import Model, OnLayers, one_of_each
from engine.runner.backend import ModelBackend
from engine.runner.capture import Pieces
from engine.runner.prompt_graphs import PromptGraphs
from tests.support.checkpoints import model_backend, prompt_row, random_prompt, tiny_checkpoint
from tests.support.family import FAMILY

LAYERS = 9
SHARING = {**FAMILY["deepseek-v3.2"], "index_topk_freq": 3, "index_skip_topk_offset": 2}


class Launches(TorchDispatchMode):
    """Notes each operation with the types and widths of what it takes; how many rows an expert gets depends on them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[tuple[object, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add((str(func), *map(_form, args)))
        return func(*args, **(kwargs or {}))


def _form(argument: object) -> object:
    if not isinstance(argument, torch.Tensor):
        return type(argument)
    return argument.dtype, argument.shape[-1] if argument.dim() > 1 else None


def launches(backend: ModelBackend, model: Model) -> set[tuple[object, ...]]:
    rows = [prompt_row(random_prompt(70), 69, 70, range(2)), prompt_row(random_prompt(30), 0, 30, range(2, 3))]
    with torch.inference_mode(), Launches() as noted:
        model.forward(build_context(model.config, rows, backend.state))
    return noted.found


@pytest.mark.parametrize(
    ("overrides", "few"),
    [({}, 6), ({"first_k_dense_replace": 0}, 3), ({"first_k_dense_replace": LAYERS}, 3), (SHARING, 8)],
    ids=["experts after dense layers", "experts alone", "dense alone", "indexers"],
)
def test_few_layers_launch_all_that_the_model_does(overrides: dict[str, Any], few: int, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": LAYERS, "first_k_dense_replace": 3, **overrides}
    backend = model_backend(tiny_checkpoint(tmp_path, **layers))
    model = backend.weights
    assert len(model.short().layers) <= few < len(model.layers) == LAYERS
    assert launches(backend, model.short()) == launches(backend, model)


def test_the_short_model_of_a_short_one_is_itself(tmp_path: Path) -> None:
    short = model_backend(tiny_checkpoint(tmp_path, num_hidden_layers=LAYERS)).weights.short()
    assert short.short().layers == short.layers


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_each_kind_follows_each_that_it_follows(kinds: Sequence[str]) -> None:
    found = [kinds[index] for index in one_of_each(kinds)]
    assert {*pairwise(found)} >= {*pairwise(kinds)}
    assert (found[0], found[-1]) == (kinds[0], kinds[-1])


class CaptureOfKnown:
    """An `engine.runner.capture.Capture` that notes what pieces launch and nothing has launched before."""

    def __init__(self, known: Launches) -> None:
        self.known = known
        self.new: set[tuple[object, ...]] = set()

    def in_pieces(self, work: Callable[[Pieces], None]) -> Pieces:
        known = set(self.known.found)
        work(self)
        # Memory that they take is no launch.
        self.new |= {launch for launch in self.known.found - known if "empty" not in str(launch[0])}
        return self

    def cut(self, between: Callable[..., None], *tensors: torch.Tensor) -> None:
        pass

    def layer_enqueued(self, layers: int) -> None:
        pass

    def run(self, context: ForwardContext, on_layers: OnLayers | None) -> None:
        pass

    def whole(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


@pytest.mark.parametrize("overrides", [{}, FAMILY["deepseek-v3.2"]], ids=["dense", "indexers"])
def test_pieces_capture_what_few_layers_have_launched(overrides: dict[str, Any], tmp_path: Path) -> None:
    """A kernel that is loaded while a graph is captured would end the capture."""
    backend = model_backend(tiny_checkpoint(tmp_path, num_hidden_layers=LAYERS, **overrides))
    with torch.inference_mode(), Launches() as noted:
        capture = CaptureOfKnown(noted)
        PromptGraphs(backend.weights, backend.state, [48], capture)
    assert noted.found and not capture.new
