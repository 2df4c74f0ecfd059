"""Checks grammars before a worker gets them, away from the event loop."""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from mesh.domain.constraints import MAX_GRAMMAR_CHARACTERS
from mesh.errors import InvalidConstraint
from mesh.grammars import check_grammar
from mesh.observe import span

# How long a grammar may take, with those that are checked before it.
CHECK_SECONDS = 5.0
# Grammars that were found right and are not checked again, by their hash.
KNOWN_GRAMMARS = 1024


class GrammarChecks:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._known: OrderedDict[int, None] = OrderedDict()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def check(self, grammar: str, field: str) -> None:
        """Raises InvalidConstraint, which names the field."""
        if len(grammar) > MAX_GRAMMAR_CHARACTERS:
            message = f"{field} has {len(grammar)} characters as a grammar, the limit is {MAX_GRAMMAR_CHARACTERS}"
            raise InvalidConstraint(message, field=field)
        known = hash(grammar)
        if known in self._known:
            self._known.move_to_end(known)
            return
        try:
            with span("gateway.check_grammar"):
                async with asyncio.timeout(CHECK_SECONDS):
                    await asyncio.get_running_loop().run_in_executor(self._thread, check_grammar, grammar)
        except TimeoutError:
            raise InvalidConstraint(f"{field} took longer than {CHECK_SECONDS:g} s: simplify it", field=field) from None
        except InvalidConstraint as error:
            raise InvalidConstraint(error.message, field=field) from error
        self._known[known] = None
        if len(self._known) > KNOWN_GRAMMARS:
            self._known.popitem(last=False)
