"""The options of an evaluation: what is evaluated, and with which questions."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from eval.suite import LONG_PROBLEMS, SHORT_PROBLEMS, SuiteName
from mesh.config import Config

# A bound, because all problems are drawn, each different from the others, before the first is asked.
MOST_PROBLEMS = 10_000


class EvalOptions(Config):
    """Options of `deepmesh eval`. Exactly one of `url` and `model_dir` names what is evaluated."""

    # Base of an OpenAI API, e.g. http://127.0.0.1:8000/v1.
    url: str | None = None
    # A checkpoint, served for the evaluation by a mesh of its own.
    model_dir: Path | None = None
    # By default the first model that the endpoint lists.
    served_model: str | None = None
    api_key: str | None = Field(default=None, repr=False)
    # Settings of that mesh, such as "decode.engine.dtype=bfloat16".
    settings: tuple[str, ...] = ()

    suite: SuiteName = "short"
    # Problems of each short task, and of each long task at each length.
    problems: int = Field(default=SHORT_PROBLEMS, ge=1, le=MOST_PROBLEMS)
    long_problems: int = Field(default=LONG_PROBLEMS, ge=1, le=MOST_PROBLEMS)
    seed: int = Field(default=0, ge=0)
    # Tokens of an answer with its reasoning; by default the most that the suite's solutions take.
    max_tokens: int | None = Field(default=None, ge=1)
    # 0 is greedy; above it every question is sampled with a seed of its own.
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)

    # Questions in flight at once.
    concurrency: int = Field(default=16, ge=1)
    # Seconds for one answer; a slow endpoint computes all answers in flight before the last of them.
    timeout_s: float = Field(default=3600.0, gt=0)
    # Answers, the mesh's log and the result lie here; by default out/eval/<model>-<suite>.
    out: Path | None = None

    @model_validator(mode="after")
    def _names_one_target(self) -> Self:
        if (self.url is None) == (self.model_dir is None):
            raise ValueError("name what to evaluate: --model DIR or --url http://host:port/v1, one of them")
        if self.settings and self.url is not None:
            raise ValueError("--set changes a mesh that is started for --model; an endpoint at --url runs already")
        return self

    @property
    def name(self) -> str:
        """The model's name, in a form for file names. With an endpoint, `evaluation.named` must have set it before."""
        if self.model_dir is not None:
            return self.model_dir.resolve().name
        assert self.served_model is not None
        # Names may have slashes and may begin with dots.
        kept = "".join(each if each.isalnum() or each in "._-" else "-" for each in self.served_model)
        return kept.strip(".-") or "model"

    @property
    def directory(self) -> Path:
        return self.out or Path("out/eval") / f"{self.name}-{self.suite}"

    @property
    def what_answers_depend_on(self) -> dict[str, Any]:
        """The options on which answers depend: if one changes, earlier answers cannot be used."""
        return self.model_dump(mode="json", exclude={"api_key", "concurrency", "timeout_s", "out"})
