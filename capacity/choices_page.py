"""`python -m capacity.choices_page`: makes docs/choices.md, what `deepmesh up` chooses for models of the family."""

import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from capacity.cards import GPUS
from capacity.shapes import DEEPSEEK_R1, EXPERTS, GLM_FLASH, MOONLIGHT
from engine.config import EngineConfig
from engine.memory.rank_memory import GB
from engine.model.config import ModelConfig, parse_model_config
from engine.parallel.layout import Layout
from engine.settings.card import Card
from engine.settings.fitting import RANKS, check_fits, fewest_ranks
from engine.settings.resolve import Resolved, resolve_settings
from engine.settings.rules import FEWEST_REQUESTS, REQUEST_TOKENS
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError

# R1 and V3.1 have one shape, and MTP modules, which the shapes for benchmarks leave out.
_R1 = dict(DEEPSEEK_R1) | {"num_nextn_predict_layers": 1}
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "DeepSeek-R1 and V3.1, FP8": _R1,
        "DeepSeek-R1 and V3.1, INT4 experts": _R1 | {"quantization_config": EXPERTS["w4a8"]},
        "DeepSeek-V3.1, NVFP4": _R1 | {"quantization_config": EXPERTS["nvfp4"]},
        "Moonlight-16B-A3B, bf16": dict(MOONLIGHT),
        "GLM-4.7-Flash, bf16": dict(GLM_FLASH),
    }
)
CARDS = ("h100", "h200")
_COLUMNS = (
    "GPUs",
    "layout",
    "weights, GB a GPU",
    "KV, tokens a GPU",
    "requests",
    "step, tokens",
    "drafts",
    "copies of experts",
)
_EXAMPLE = "DeepSeek-R1 and V3.1, INT4 experts", "h200", 4
_HEAD = """<!-- Written by `make docs` from engine/settings/rules.py. -->

# What `deepmesh up` chooses

Every setting that decides how fast a worker is, and that you do not give, is chosen when the worker starts on GPUs,
from the model, the card, the number of GPUs and the role. The log has each choice with its reason, once. `deepmesh
config decode --resolved --model DIR --gpus 4` shows them without starting anything, also on a machine without GPUs:
`--gpu h200` names a card.

- **What you give wins**, even if it is the default: `--set decode.engine.max_requests=64`.
- **`--aim`** turns the settings that trade one thing for another: `balanced` (the default), `throughput` (more
  requests at once, longer steps, none cut short for even gaps) or `latency` (few requests; all GPUs of a worker
  compute each token together).
- **Number formats** other than the published ones are chosen where [a GPU's answers](quality-gpu.md) differ by no
  more than chance, and where that ran: FP8 attention of prompts, for FP8 models on one GPU. FP8 KV lost 11 problems
  of 600 and won 3 with earlier weights of tiny-r1, and 3 and 4 with those that are shipped. `--exact` keeps the
  published formats in any case.
- **GPUs**: without `--gpus` a worker takes as few as hold the model and {requests} requests of {tokens:,} tokens
  each. A model or a setting that the cards have no room for is refused before anything starts, with what fits.
- **Host memory**: stores of one machine share a quarter of what is available when the first worker attaches
  (`kvstore.memory_share`), and [blocks that a pool evicts](kv-transfer.md#host-memory-under-the-pool) stay on a GPU.
- **On a CPU nothing is chosen**: the defaults are what [was measured there](performance-cpu.md). Nor is anything on
  several hosts, which have served tiny models alone on GPUs, but for the layout.

Moonlight [on one H200](performance.md#how-fast-is-a-model-that-one-gpu-holds-compared-with-vllm) ran as it stands
here but for even steps: 31.9 GB of weights, 1.8 of graphs and 1.5 of a step's work, where 31.9, 1.6 and 3.0 were
reckoned. So did 28 of R1's layers with INT4 experts on two: [both compared with hand-made
settings](performance.md#is-deepmesh-up-alone-as-fast-as-with-hand-made-settings). And all 61 layers [on four
H200](performance.md#what-does-deepseek-r1-take-on-four-gpus), without an MTP module: 108.1 GB of weights and copies,
3.8 of graphs and 4.2 of a step's work, where 108.0, 3.0 and 8.3 were reckoned, and 408,000 tokens of KV for 352,512.
Nothing else did. The tables are what the rules make of the models' shapes and of the cards' memory, and memory is
reckoned. Copies and drafts may take a quarter of the KV at most.
"""


def choices_page() -> str:
    """The page as Markdown."""
    head = _HEAD.format(requests=FEWEST_REQUESTS, tokens=REQUEST_TOKENS)
    return "\n".join([head, *(line for name in MODELS for line in _section(name)), *_reasons(*_EXAMPLE)]) + "\n"


def _section(name: str) -> Iterator[str]:
    model = parse_model_config(MODELS[name])
    yield f"## {name}\n"
    alone = {card: _alone(model, _card(card)) for card in CARDS}
    yield f"`deepmesh up` alone takes {' or '.join(f'{count} {card.upper()}' for card, count in alone.items())}.\n"
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|---" * len(_COLUMNS) + "|"
    for card in CARDS:
        for ranks in RANKS:
            yield f"| {ranks} {card.upper()} | {' | '.join(_row(model, _card(card), ranks))} |"
    yield ""


def _row(model: ModelConfig, card: Card, ranks: int) -> list[str]:
    try:
        found = _resolved(model, card, ranks)
        memory = check_fits(model, card, found.engine)
    except ConfigError:
        return ["does not fit", *[""] * 6]
    engine, layout = found.engine, Layout.of(found.engine.parallel)
    return [
        f"dp {layout.dp}, ep {layout.ep}" if layout.world > 1 else "one rank",
        f"{(memory.weights + memory.drafts + memory.copies) / GB:.1f}",
        f"{memory.kv_tokens:,}",
        f"{engine.max_requests} a GPU",
        f"{engine.max_step_tokens:,}",
        str(engine.drafts.next_n),
        str(engine.balance.redundant),
    ]


def _reasons(name: str, card: str, ranks: int) -> Iterator[str]:
    yield f"## Why\n\nThe choices for {name}, on {ranks} {card.upper()}, as a worker logs them:\n\n```"
    yield from map(str, _resolved(parse_model_config(MODELS[name]), _card(card), ranks).choices)
    yield "```"


def _resolved(model: ModelConfig, card: Card, ranks: int) -> Resolved:
    drafts = model.num_nextn_predict_layers > 0
    return resolve_settings(_engine(ranks), WorkerRole.DECODE, model, [card] * ranks, drafts=drafts)


def _alone(model: ModelConfig, card: Card) -> str:
    drafts = model.num_nextn_predict_layers > 0
    found = fewest_ranks(_engine(1), WorkerRole.DECODE, model, card, drafts=drafts, most=max(RANKS))
    return "no" if found is None else str(found)


def _engine(ranks: int) -> EngineConfig:
    return EngineConfig.model_validate({"model_dir": "MODEL", "parallel": {"ranks": ranks}})


def _card(name: str) -> Card:
    return Card(name, int(GPUS[name].memory_bytes), GPUS[name].capability)


if __name__ == "__main__":
    sys.stdout.write(choices_page())
