"""How a model's positions are rotated beyond the length that it was pretrained with."""

import math
from dataclasses import dataclass

from engine.model.json_reader import JsonReader
from mesh.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al., "YaRN: Efficient Context Window Extension", 2023), as DeepSeek and transformers apply it."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    # Whether the ramp between fast and slow pairs begins and ends at whole pairs.
    truncate: bool
    mscale: float
    mscale_all_dim: float
    # Replaces what follows from mscale and mscale_all_dim on rotations; None if it is not set.
    attention_factor: float | None = None

    def magnitude(self, mscale: float) -> float:
        """The attention temperature correction of section 3.4, scaled by `mscale`."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def rotation_scale(self) -> float:
        """Factor on the cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)

    @property
    def softmax_scale(self) -> float:
        """Factor on the attention scores."""
        return self.magnitude(self.mscale_all_dim) ** 2


def read_rope(reader: JsonReader) -> tuple[float, Yarn | None]:
    """The base of the rotations' frequencies and their scaling, from a model's config.json. Raises CheckpointError."""
    # transformers 5 keeps theta and scaling in rope_parameters; everyone before keeps them apart. If a file has both,
    # transformers reads the older.
    scaling = reader.section("rope_scaling") or reader.section("rope_parameters") or JsonReader({})
    theta = scaling.number("rope_theta", reader.number("rope_theta", 10000.0))
    if theta <= 1:
        raise CheckpointError(f"rope_theta is {theta}: expected more than 1")
    for each in (reader, scaling):
        if (share := each.number("partial_rotary_factor", 1.0)) != 1:
            raise CheckpointError(f"partial_rotary_factor is {share}: only whole heads are rotated")
    kind = scaling.text("rope_type", "type")
    if kind is None or kind == "default":
        return theta, None
    if kind != "yarn":
        raise CheckpointError(f"rope scaling {kind!r} is not supported: expected 'yarn' or none")
    return theta, _read_yarn(reader, scaling)


def _read_yarn(reader: JsonReader, scaling: JsonReader) -> Yarn:
    length = "original_max_position_embeddings"
    longest = reader.positive("max_position_embeddings")
    yarn = Yarn(
        factor=scaling.number("factor"),
        # Above the section it goes before the section's own, as in transformers.
        original_max_position_embeddings=reader.positive(length, scaling.positive(length, longest)),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        mscale=scaling.number("mscale", 1.0),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
        attention_factor=scaling.number("attention_factor") if scaling.has("attention_factor") else None,
    )
    if not (yarn.factor and yarn.beta_fast and yarn.beta_slow and yarn.rotation_scale):
        raise CheckpointError("rope scaling 'yarn' needs factor, beta_fast, beta_slow and attention_factor above 0")
    # DeepSeek's own code takes the quotient of their magnitudes; transformers ignores both if one is 0.
    one_missing = not (yarn.mscale and yarn.mscale_all_dim)
    if yarn.attention_factor is None and one_missing and yarn.rotation_scale != yarn.magnitude(1.0):
        raise CheckpointError(
            f"rope scaling 'yarn' has mscale {yarn.mscale:g} and mscale_all_dim {yarn.mscale_all_dim:g}: where one of"
            " them is 0, DeepSeek's code and transformers compute different logits"
        )
    return yarn
