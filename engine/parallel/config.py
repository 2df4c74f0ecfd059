"""Configuration of how the ranks of a worker divide a model."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mesh.config import Config

# Most ranks of a worker on all hosts. Each rank is a process: without a limit a mistyped number would fill the machine.
MOST_WORKER_RANKS = 1024
# A chunk of fewer tokens takes as long divided over four H200 as on one of them.
FEWEST_DIVIDED = 512


class ParallelConfig(Config):
    """A worker has tp * dp ranks, each a process of its own."""

    ranks: int | None = Field(default=None, ge=1)
    """How many ranks; by default tp * dp. If neither of these is set, the worker's role chooses: ranks that decode
    batch requests of their own (dp), ranks of a prefill worker compute each prompt together (tp).
    """
    tp: int | None = Field(default=None, ge=1)
    """Ranks that compute a request together, each with some of the attention heads (tensor parallelism)."""
    dp: int | None = Field(default=None, ge=1)
    """Groups of tp ranks; each has requests and a KV pool of its own (data parallelism of attention)."""
    ep: int | None = Field(default=None, ge=1)
    """Parts into which the routed experts are divided (expert parallelism); ranks / ep ranks share a part, each with
    some of its width. By default one part a rank. If experts do not divide evenly, each part has room for its share
    rounded up, and what is left holds copies: 256 experts and 64 copies on 320 parts of one.
    """
    two_batch: Literal["auto", "on", "off"] = "off"
    """Compute a step as two micro-batches, so that the tokens of one travel between ranks that divide the experts while
    the other is computed: "on" divides each step of two tokens and more; "auto" divides steps that were faster so
    when the worker measured them before serving.
    """
    hosts: int = Field(default=1, ge=1)
    """On how many hosts the ranks run: equally many on each, and all ranks of a tp group on one (docs/scale-out.md).
    One service is started on each host, with this configuration and the variables of torchrun or of a LeaderWorkerSet.
    """
    least_hosts: int | None = Field(default=None, ge=2)
    """With how many of its `hosts` a worker serves if the others do not come: with less room for requests, and with all
    experts on the ranks that are left, which load again. By default it waits for all.
    """
    missing_host_seconds: float = Field(default=60, gt=0)
    """How long a worker waits for all of its hosts before it forms with `least_hosts` or more."""
    context_parallel_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """All dp ranks together compute a chunk of a prompt that has at least this many tokens in a step, if that makes the
    step shorter (context parallelism; only with tp 1). "auto" is 512 if there are several ranks on one host.
    """
    context_parallel_reach: int | None = Field(default=None, ge=1)
    """How many leading tokens of a prompt the ranks may compute together; its own rank computes later ones alone. Each
    rank keeps room for the keys of this many tokens more. By default 32768, or a tenth of the KV pool if that is less.
    """
    prompt_wait_steps: int = Field(default=16, ge=0)
    """How many steps a prompt waits at most for prompts of the other dp ranks while some rank decodes: a prompt on a
    single rank holds up all ranks. It does not wait if no prompt has come for as many steps, if few of its tokens are
    not cached, or if all ranks compute it together. With 0 no prompt waits.
    """

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.ranks or (self.tp or 1) * (self.dp or 1)

    @property
    def divided_tokens(self) -> int | None:
        """`context_parallel_tokens` without "auto"; None if no chunk is divided."""
        if self._group > 1 or self.world == 1:
            return None
        if self.context_parallel_tokens != "auto":
            return self.context_parallel_tokens
        return FEWEST_DIVIDED if self.hosts == 1 and self.two_batch != "on" else None

    @property
    def ranks_a_host(self) -> int:
        return self.world // self.hosts

    def on_hosts(self, hosts: int) -> "ParallelConfig":
        """The same ranks on fewer hosts: those of the others are left out."""
        dp = self.ranks_a_host * hosts // self._group
        parts = None if self.ep is None else self.ep // self.hosts * hosts
        sizes = {"ranks": None, "tp": self._group, "dp": dp, "ep": parts}
        return self.model_copy(update={**sizes, "hosts": hosts, "least_hosts": None})

    @property
    def groups_a_host(self) -> int:
        """TP groups on each host."""
        return self.ranks_a_host // self._group

    @property
    def _group(self) -> int:
        """Ranks of a TP group, as in `Layout.of`."""
        return self.tp or self.world // (self.dp or self.world)

    @model_validator(mode="after")
    def _ranks_are_divided_evenly(self) -> Self:
        said = (self.tp or 1) * (self.dp or 1)
        both = self.tp is not None and self.dp is not None
        if self.world % said or (both and self.world != said):
            sizes = {"tp": self.tp, "dp": self.dp}
            named = " and ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
            raise ValueError(f"engine.parallel.ranks={self.ranks} does not fit engine.parallel's {named}")
        if self.world > MOST_WORKER_RANKS:
            raise ValueError(f"engine.parallel asks for {self.world} ranks (tp * dp): at most {MOST_WORKER_RANKS}")
        if self.ep is not None and self.world % self.ep:
            raise ValueError(f"engine.parallel.ep={self.ep} does not divide the {self.world} ranks (tp * dp)")
        if self.world % self.hosts:
            raise ValueError(f"engine.parallel.hosts={self.hosts} does not divide the {self.world} ranks (tp * dp)")
        if self.tp is not None and self.ranks_a_host % self.tp:
            raise ValueError(
                f"engine.parallel.tp={self.tp} does not divide the {self.ranks_a_host} ranks of each host: the ranks of"
                " a tp group lie on one host"
            )
        return self

    @model_validator(mode="after")
    def _fewer_hosts_are_whole(self) -> Self:
        if self.least_hosts is None:
            return self
        if self.least_hosts >= self.hosts:
            raise ValueError(
                f"engine.parallel.least_hosts={self.least_hosts} must be less than engine.parallel.hosts={self.hosts}"
            )
        if self.ep is not None and self.ep % self.hosts:
            raise ValueError(
                f"engine.parallel.least_hosts needs whole parts of the experts on each host:"
                f" engine.parallel.ep={self.ep} is no multiple of engine.parallel.hosts={self.hosts}"
            )
        return self
