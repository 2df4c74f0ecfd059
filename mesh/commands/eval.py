"""`deepmesh eval`: how good a model is, at any OpenAI-compatible endpoint."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mesh.config import validate

if TYPE_CHECKING:
    from eval.options import EvalOptions
    from eval.perplexity import Document
