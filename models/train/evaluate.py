"""How good the model is on held-out problems, by generated answers and by its choices along given solutions."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, islice
from random import Random

import torch
from tokenizers import Tokenizer

from eval.tasks import LONG_TASKS, SHORT_TASKS, Problem, draw, draw_long, grade
from models.train.batch import IGNORED
from models.train.device_batch import DeviceBatch
from models.train.experts import Experts
from models.train.fake_quantization import quantized_weight
from models.train.generate import generate
from models.train.json_talk import json_talk
from models.train.layers import Linear
from models.train.mixture import solved
from models.train.model import TinyModel
from models.train.packing import BatchShape, Document, choose, pack, tokenize
from models.train.tool_talk import tool_talk
from tools.chat import Example, conversation, learned_conversation
from tools.tokenizer_files import END

# More tokens than any solution takes.
MOST_NEW_TOKENS = 448


@dataclass(frozen=True)
class Retraced:
    """The model's choices along given solutions."""

    # Share of solutions in which every token is the model's first choice; greedy decoding solves at least these.
    exact: Mapping[str, float]
    # Share of the positions at which the MTP module's first choice equals the main model's later choice.
    draft_acceptance: float


def short_problems(count: int, seed: int) -> dict[str, list[Problem]]:
    """`count` held-out problems of each short task."""
    random = Random(seed)
    return {name: [draw(task, random, held_out=True) for _ in range(count)] for name, task in SHORT_TASKS.items()}


def long_problems(
    count: int, tokens: int, characters_per_token: Mapping[str, float], seed: int
) -> dict[str, list[Problem]]:
    """`count` held-out problems of each long task, with prompts of about `tokens` tokens."""
    random = Random(seed)
    return {
        f"{name}@{tokens}": [
            draw_long(task, random, round(tokens * characters_per_token[name]), held_out=True) for _ in range(count)
        ]
        for name, task in LONG_TASKS.items()
    }


def talks(count: int, seed: int) -> dict[str, list[Example]]:
    """`count` held-out conversations with tools, and as many with answers in JSON."""
    random = Random(seed)
    tools = [tool_talk(random, held_out=True) for _ in range(count)]
    return {
        "tools": [learned_conversation(talk.turns, talk.system) for talk in tools],
        "json": [learned_conversation(json_talk(random, held_out=True)) for _ in range(count)],
    }


def worked_out(problems: Mapping[str, Sequence[Problem]]) -> dict[str, list[Example]]:
    """The problems with their solutions."""
    return {name: [conversation([solved(problem)]) for problem in members] for name, members in problems.items()}


def inference_copy(model: TinyModel) -> TinyModel:
    """A copy of the model in which the weights that were trained for FP8 are rounded as an FP8 checkpoint has them."""
    copied = deepcopy(model)
    for module in copied.modules():
        if isinstance(module, (Linear, Experts)) and module.fp8:
            for weight in [module.weight] if isinstance(module, Linear) else module.routed_weights():
                weight.data = quantized_weight(weight.data)
            module.fp8 = False
    return copied


def exact_match(model: TinyModel, tokenizer: Tokenizer, problems: Mapping[str, Sequence[Problem]]) -> dict[str, float]:
    """Share of each task's problems that greedy decoding solves."""
    answers = _answers(model, tokenizer, worked_out(problems))
    return {
        name: _share(grade(problem, text) for problem, text in zip(members, answers[name], strict=True))
        for name, members in problems.items()
    }


def exact_talks(model: TinyModel, tokenizer: Tokenizer, examples: Mapping[str, Sequence[Example]]) -> dict[str, float]:
    """Share of each kind's conversations whose last answer greedy decoding writes as it was made."""
    answers = _answers(model, tokenizer, examples)
    return {
        name: _share(each.completion == text + END for each, text in zip(members, answers[name], strict=True))
        for name, members in examples.items()
    }


def _answers(model: TinyModel, tokenizer: Tokenizer, examples: Mapping[str, Sequence[Example]]) -> dict[str, list[str]]:
    """The model's own last answers."""
    flat = [example for members in examples.values() for example in members]
    contexts = ["".join(chain(*example.earlier, (example.context,))) for example in flat]
    prompts = [encoding.ids for encoding in tokenizer.encode_batch_fast(contexts, add_special_tokens=False)]
    end = tokenizer.token_to_id(END)
    assert end is not None
    completions = generate(model, prompts, MOST_NEW_TOKENS, end)
    texts = iter(tokenizer.decode_batch(completions, skip_special_tokens=False))
    return {name: list(islice(texts, len(members))) for name, members in examples.items()}


def _share(hits: Iterable[bool]) -> float:
    values = list(hits)
    return sum(values) / len(values)


@torch.no_grad()
def retrace(
    model: TinyModel, tokenizer: Tokenizer, examples: Mapping[str, Sequence[Example]], shape: BatchShape
) -> Retraced:
    """Both shares on the examples' completions, in batches of `shape`."""
    pool: list[Document] = []
    names: dict[int, str] = {}
    for name, members in examples.items():
        documents = tokenize(tokenizer, members)
        names |= {id(document): name for document in documents}
        pool += documents
    hits: dict[str, list[bool]] = {name: [] for name in examples}
    accepted = drafted = 0
    while pool:
        chosen, pool = choose(pool, shape)
        right, agreed = _choices(model, chosen, shape)
        begin = 0
        for document in chosen:
            end = begin + len(document.tokens)
            hits[names[id(document)]].append(bool(right[begin : end - 1].all()))
            accepted += int(agreed[begin : end - 2].sum())
            drafted += sum(document.learned)
            begin = end
    exact = {name: _share(values) for name, values in hits.items()}
    return Retraced(exact, accepted / drafted)


def _choices(model: TinyModel, documents: Sequence[Document], shape: BatchShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bool tensors [tokens] on the CPU: whether the choice is right or does not count; whether the draft agrees and
    counts.
    """
    batch = DeviceBatch.of(pack(documents, shape), model.cosine.device)
    layout = model.layout(batch.positions, batch.boundaries, batch.longest)
    hidden = model(batch.tokens, layout, [])
    chosen = model.lm_head(hidden).argmax(-1)
    drafts = model.lm_head(model.second(hidden, batch.tokens, layout, [])).argmax(-1)
    right = (chosen == batch.targets) | (batch.targets == IGNORED)
    agreed = (drafts == chosen.roll(-1)) & (batch.second_targets != IGNORED)
    return right.cpu(), agreed.cpu()


@torch.no_grad()
def attention_recall(
    model: TinyModel, tokenizer: Tokenizer, examples: Sequence[Example], shape: BatchShape
) -> torch.Tensor:
    """By layer, MTP's last, the shares of attention that go to as many tokens as indexers choose, on the CPU, [layers,
    3]: to those that they choose, to those with the most attention, and to any. Attention is to all tokens if the model
    does not select. Rows are drawn as in training: they see more tokens than are chosen, and half of them are learned.
    """
    assert model.config.indexer is not None
    shares, pool = [], tokenize(tokenizer, examples)
    while pool:
        documents, pool = choose(pool, shape)
        batch = DeviceBatch.of(pack(documents, shape), model.cosine.device)
        lesson = model.lesson(batch)
        layout = model.layout(batch.positions, batch.boundaries, batch.longest, lesson)
        model.second(model(batch.tokens, layout, []), batch.tokens, layout, [])
        shares.append(torch.stack([layer.recall(model.config.indexer.top_k) for layer in lesson.layers]))
    return torch.stack(shares).mean(0).cpu()
