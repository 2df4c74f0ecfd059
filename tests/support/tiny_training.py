"""A recipe so small that a CPU can train a few steps of it."""

from functools import cache

import torch
from tokenizers import Tokenizer

from engine.model.config import parse_model_config
from eval.library_text import LibraryEntry
from models.train.mixture import ExampleStream, Mixture
from models.train.model import TinyModel
from models.train.packing import BatchShape, BatchSource
from models.train.recipe import TINY_R1, Checkup, Recipe, Stage
from models.train.vocabulary import train_tokenizer

CONFIG = {
    **TINY_R1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "kv_lora_rank": 64,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 384,
}
LIBRARY = (
    LibraryEntry("json.dumps", "json.dumps(obj)", "Serialize obj to a JSON formatted string. Keys are strings."),
)
STAGE = Stage("short", 1.0, Mixture(0.1, (100, 300)), BatchShape(tokens=1024, longest=512, documents=16))
RECIPE = Recipe(CONFIG, (STAGE,), Checkup(1, 1, (256,), BatchShape(2048, 1024, 32)))


def make_model() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel(parse_model_config(CONFIG), torch.float32)


def make_lively_model() -> TinyModel:
    """A model without zero parameters, so that every part affects its output."""
    model = make_model()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for gate in model.gates():
        gate.bias.normal_(std=0.1)
    return model


@cache
def make_tokenizer() -> Tokenizer:
    return train_tokenizer(ExampleStream(STAGE.mixture, LIBRARY, seed=0), CONFIG["vocab_size"], examples=500)


def make_source() -> BatchSource:
    ratios = {"needle": 2.0, "key_value": 1.2, "copy_section": 2.0}
    return BatchSource(make_tokenizer(), LIBRARY, ratios, STAGE.mixture, STAGE.shape, seed=0)
