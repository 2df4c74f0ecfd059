"""Compiles the grammars of a rank's requests and makes their masks, on two threads of its own.

A grammar is compiled before its request is queued, so that no step waits for it. The grammar library releases the
interpreter's lock while it works.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLTokenizer

from engine.config import EngineConfig
from engine.constraints.answer import AnswerMasks, ConstrainedAnswer, in_words
from engine.constraints.grammar import SharedGrammar
from engine.requests.request import Request
from mesh.domain.constraints import Constraint
from mesh.errors import ConfigError, InvalidConstraint, MeshError
from mesh.observe.spans import span
from mesh.text.grammars import compile_grammar, load_grammar_tokenizer
from mesh.text.tokenizer_file import read_tokenizer, tokenizer_path

# How many compiled grammars are kept: clients send the same ones again.
KEPT_GRAMMARS = 64

_log = logging.getLogger("deepmesh.engine")


class Constraints:
    """`wake` is called from another thread whenever a request's grammar is compiled."""

    def __init__(
        self,
        tokenizer: LLTokenizer | None,
        vocabulary_size: int,
        eos_token_ids: frozenset[int],
        wake: Callable[[], None],
    ) -> None:
        # None if the checkpoint has no tokenizer that the grammar library knows.
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = eos_token_ids
        self._wake = wake
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        # Compiled grammars, which only the compiling thread uses; the least recently used one first.
        self._grammars: OrderedDict[str, SharedGrammar] = OrderedDict()
        self._begun: list[tuple[Request, Future[ConstrainedAnswer]]] = []

    def successor(self) -> "Constraints":
        """Constraints for the next engine of this process. They keep the tokenizer: reading one of 129,280 tokens takes
        a second.

        This object's requests have ended.
        """
        for pool in (self._compiler, self._masker):
            pool.shutdown(wait=False, cancel_futures=True)
        return Constraints(self._tokenizer, self._vocabulary_size, self._eos_token_ids, self._wake)

    @property
    def pending(self) -> int:
        """Requests that were begun and not drained, without those that have ended since."""
        return sum(not request.ended for request, _ in self._begun)

    @property
    def ready(self) -> bool:
        """Whether `drain` has something."""
        return any(compiled.done() for _, compiled in self._begun)

    def begin(self, request: Request, constraint: Constraint, delivered: Sequence[int]) -> None:
        """Compile the request's grammar, and follow it through the tokens that another worker delivered."""
        compiled = self._compiler.submit(self._compile, constraint, request.stop_token_ids, delivered)
        compiled.add_done_callback(lambda _: self._wake())
        self._begun.append((request, compiled))

    def drain(self) -> list[tuple[Request, MeshError | None]]:
        """The requests that have their masks since the last call, or why they get none."""
        done = [(request, compiled) for request, compiled in self._begun if compiled.done()]
        self._begun = [(request, compiled) for request, compiled in self._begun if not compiled.done()]
        return [(request, self._settle(request, compiled)) for request, compiled in done]

    def _settle(self, request: Request, compiled: Future[ConstrainedAnswer]) -> MeshError | None:
        error = compiled.exception()
        if error is not None:
            return in_words(error)
        request.masks = AnswerMasks(compiled.result(), self._masker)
        return None

    def _compile(
        self, constraint: Constraint, stop_token_ids: frozenset[int], delivered: Sequence[int]
    ) -> ConstrainedAnswer:
        with span("engine.compile_grammar"):
            grammar = None if constraint.grammar is None else self._grammar(constraint.grammar)
            answer = ConstrainedAnswer(constraint, grammar, self._vocabulary_size, self._eos_token_ids, stop_token_ids)
            answer.advance(delivered)
        return answer

    def _grammar(self, grammar: str) -> SharedGrammar:
        if self._tokenizer is None:
            raise InvalidConstraint("this worker follows no grammars: its checkpoint has no tokenizer")
        compiled = self._grammars.pop(grammar, None)
        if compiled is None or compiled.is_spent:
            compiled = SharedGrammar(compile_grammar(self._tokenizer, grammar))
        self._grammars[grammar] = compiled
        if len(self._grammars) > KEPT_GRAMMARS:
            self._grammars.popitem(last=False)
        return compiled


def load_constraints(
    config: EngineConfig, vocabulary_size: int, eos_token_ids: frozenset[int], wake: Callable[[], None]
) -> Constraints:
    """Constraints of the configured model. Without a tokenizer they refuse grammars."""
    tokenizer = None
    model_dir = config.model_dir
    if config.backend == "model" and model_dir is not None and tokenizer_path(model_dir) is not None:
        try:
            with span("engine.load_tokenizer"):
                tokenizer = load_grammar_tokenizer(read_tokenizer(model_dir), vocabulary_size, eos_token_ids)
        except (ConfigError, ValueError) as error:
            _log.warning("grammars do not know this tokenizer", extra={"fields": {"error": str(error)}})
    return Constraints(tokenizer, vocabulary_size, eos_token_ids, wake)
