"""Reads and checks grammars before a worker gets them, away from the event loop."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from gateway.answer_forms import GrammarForm
from mesh.domain.constraints import MAX_GRAMMAR_CHARACTERS
from mesh.errors import InvalidConstraint
from mesh.grammars import check_grammar
from mesh.observe import span

# How long a grammar may take, with those that are checked before it.
CHECK_SECONDS = 5.0
# Grammars that were found right and are not checked again, by their hash.
KNOWN_GRAMMARS = 1024

ResultT = TypeVar("ResultT")


class GrammarChecks:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._known: OrderedDict[int, None] = OrderedDict()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def in_lark(self, form: GrammarForm) -> GrammarForm:
        """Raises InvalidConstraint, which names the field."""
        return await self._run(form.in_lark, form.field)

    async def check(self, grammar: str, field: str) -> None:
        """Raises InvalidConstraint, which names the field."""
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            message = f"{field} has {len(grammar)} characters as a grammar, the limit is {MAX_GRAMMAR_CHARACTERS}"
            raise InvalidConstraint(message, field=field)
        known = hash(grammar)
        if known in self._known:
            self._known.move_to_end(known)
            return
        await self._run(partial(check_grammar, grammar), field)
        self._known[known] = None
        if len(self._known) > KNOWN_GRAMMARS:
            self._known.popitem(last=False)

    async def _run(self, work: Callable[[], ResultT], field: str) -> ResultT:
        try:
            with span("gateway.check_grammar"):
                async with asyncio.timeout(CHECK_SECONDS):
                    return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError:
            raise InvalidConstraint(f"{field} took longer than {CHECK_SECONDS:g} s: simplify it", field=field) from None
        except InvalidConstraint as error:
            raise InvalidConstraint(error.message, field=field) from error
