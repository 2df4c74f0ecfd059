"""The configuration of the oracle."""

from pathlib import Path

from pydantic import Field

from mesh.config import INTERNAL, Config


class OracleConfig(Config):
    """The engine without a model: each token is a function of the KV it reads, at a set pace."""

    vocabulary_size: int = Field(default=1000, ge=2, json_schema_extra=INTERNAL)
    """Token ids are below this."""
    context_tokens: int = Field(default=131072, ge=64)
    """Longest prompt and answer together."""
    step_ms: float = Field(default=0.0, ge=0, json_schema_extra=INTERNAL)
    """Milliseconds of one decode step; 0 is as fast as possible."""
    prefill_tokens_per_second: float = Field(default=0.0, ge=0, json_schema_extra=INTERNAL)
    """Rate at which prompts are computed; 0 is as fast as possible."""
    draft_accuracy: float = Field(default=0.8, ge=0, le=1, json_schema_extra=INTERNAL)
    """The share of drafts that are right."""
    model: str = "oracle"
    """Served under this name."""
    tokenizer_dir: Path | None = None
    """Tokenizer and chat template, needed to serve text; the engine itself needs none."""
