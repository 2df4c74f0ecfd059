"""Puts UCX's own messages into our log: one line for a kind of message, where UCX prints a backtrace for each
message.
"""

import atexit
import ctypes
import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Pause before a message from the same function of UCX is logged again: a peer that sends garbage causes thousands.
_QUIET_SECONDS = 10.0
# Values of ucs_log_level_t, and return values of a handler.
_ERROR, _WARN = 1, 2
_STOP, _CONTINUE = 0, 1
# The source file that a backtrace's lines name.
_BACKTRACE_FILE = b"log.c"
_MESSAGE_BYTES = 512

# ucs_log_func_t: file, line, function, level, component, format, va_list.
_HANDLER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


class UcxLog:
    """Takes over UCX's messages until `close`. Made once per process, by its main, after UCX was loaded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._libc, self._libucs = ctypes.CDLL(None), ctypes.CDLL("libucs.so.0")
        # When messages of this file and function may be logged again.
        self._quiet_until: dict[tuple[bytes, bytes], float] = {}
        # UCX keeps only a pointer to the handler, so we must keep it alive.
        self._handler = _HANDLER(self._handle)
        self._libucs.ucs_log_push_handler(self._handler)
        # UCX still logs after the interpreter has shut down.
        atexit.register(self.close)

    def close(self) -> None:
        """Let UCX print its messages again."""
        atexit.unregister(self.close)
        self._libucs.ucs_log_pop_handler()

    def _handle(
        self, path: bytes, line: int, function: bytes, level: int, _component: int, form: int, arguments: int
    ) -> int:
        if level not in (_ERROR, _WARN):
            # UCX itself prints what ends the process, and what a user asked for with UCX_LOG_LEVEL.
            return _CONTINUE
        name = path.rsplit(b"/", 1)[-1]
        if name != _BACKTRACE_FILE and not self._is_quiet((name, function)):
            text = ctypes.create_string_buffer(_MESSAGE_BYTES)
            self._libc.vsnprintf(
                text, ctypes.c_size_t(_MESSAGE_BYTES), ctypes.c_void_p(form), ctypes.c_void_p(arguments)
            )
            message = text.value.decode(errors="replace").replace("\n", " ")
            logger.log(
                logging.ERROR if level == _ERROR else logging.WARNING,
                "UCX: %s (%s:%d)",
                message,
                name.decode(errors="replace"),
                line,
            )
        return _STOP

    def _is_quiet(self, source: tuple[bytes, bytes]) -> bool:
        now = self._clock()
        if now < self._quiet_until.get(source, 0.0):
            return True
        self._quiet_until[source] = now + _QUIET_SECONDS
        return False
