"""Reads and checks grammars before a worker gets them, on threads, in turns among tenants."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from msgspec import json

from gateway.forms.answer_forms import GrammarForm, compiles
from gateway.forms.schema_limits import enforceable, expressions
from mesh.domain.constraints import MAX_GRAMMAR_CHARACTERS
from mesh.errors import InvalidConstraint, Overloaded
from mesh.observe.spans import span

# How long reading and checking one grammar may take, and how long it may wait for its turn.
CHECK_SECONDS = 5.0
# A tenant uses one thread at a time, so another tenant's grammar can be checked meanwhile.
THREADS = 2
RETRY_AFTER_MS = 1000
# Results for this many valid grammars are kept, by hash, so that they are not checked again.
KNOWN_GRAMMARS = 1024
KNOWN_EXPRESSIONS = 8192
# Schemas of this many bytes take less than a millisecond to look through.
SMALL_SCHEMAS = 4096

ResultT = TypeVar("ResultT")


class GrammarChecks:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
        # By tenant; held until the thread is done, which may be after the request has ended.
        self._turns: dict[str, asyncio.Lock] = {}
        self._known: OrderedDict[int, int] = OrderedDict()
        # Whether regular expressions can be compiled, by their hash.
        self._expressions: OrderedDict[int, bool] = OrderedDict()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_lark(self, form: GrammarForm, tenant: str) -> GrammarForm:
        """The grammar in Lark. Raises InvalidConstraint, which names the field, and Overloaded."""
        return await self._run(form.in_lark, form.field, tenant)

    async def enforceable(
        self, schemas: Sequence[Mapping[str, Any]], field: str, tenant: str
    ) -> Sequence[Mapping[str, Any]]:
        """The schemas without their parts that no grammar enforces. Raises InvalidConstraint and Overloaded."""
        size = sum(len(json.encode(schema)) for schema in schemas)
        check_size(size, field)

        def prune() -> Sequence[Mapping[str, Any]]:
            return [enforceable(schema, self._compiles) for schema in schemas]

        known = size <= SMALL_SCHEMAS and all(
            hash(expression) in self._expressions for schema in schemas for expression in expressions(schema)
        )
        pruned = prune() if known else await self._run(prune, field, tenant)
        while len(self._expressions) > KNOWN_EXPRESSIONS:
            self._expressions.popitem(last=False)
        return pruned

    def _compiles(self, expression: str) -> bool:
        key = hash(expression)
        if key not in self._expressions:
            self._expressions[key] = compiles(expression)
        return self._expressions[key]

    async def check(self, grammar: str, model: str, field: str, tenant: str, judge: Callable[[], int]) -> int:
        """The result of `judge` for this grammar and model; it may take a second.

        Raises InvalidConstraint, which names `field` unless `judge` names another, and Overloaded.
        """
        check_size(len(grammar), field)
        key = hash((grammar, model))
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        judged = self._known[key] = await self._run(judge, field, tenant)
        if len(self._known) > KNOWN_GRAMMARS:
            self._known.popitem(last=False)
        return judged

    async def _run(self, work: Callable[[], ResultT], field: str, tenant: str) -> ResultT:
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await turn.acquire()
        except TimeoutError:
            raise _overloaded() from None
        release = partial(_release, asyncio.get_running_loop(), turn)
        job = self._threads.submit(work)
        job.add_done_callback(release)
        try:
            with span("gateway.check_grammar"):
                async with asyncio.timeout(CHECK_SECONDS):
                    return await asyncio.wrap_future(job)
        except TimeoutError:
            if job.cancelled():
                # The check had not begun.
                raise _overloaded() from None
            raise InvalidConstraint(f"{field} took longer than {CHECK_SECONDS:g} s: simplify it", field=field) from None
        except InvalidConstraint as error:
            raise InvalidConstraint(error.message, field=error.metadata.get("field", field)) from error


def check_size(characters: int, field: str) -> None:
    """Raises InvalidConstraint if a grammar is too long."""
    if characters > MAX_GRAMMAR_CHARACTERS:
        message = f"{field} has {characters} characters as a grammar, the limit is {MAX_GRAMMAR_CHARACTERS}"
        raise InvalidConstraint(message, field=field)


def _release(loop: asyncio.AbstractEventLoop, turn: asyncio.Lock, job: Future[ResultT]) -> None:
    # The event loop is closed if the gateway has ended meanwhile.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(turn.release)


def _overloaded() -> Overloaded:
    return Overloaded("too many new grammars are being checked: try again", retry_after_ms=RETRY_AFTER_MS)
