"""A temporary directory that several processes use, such as for the sockets between a gateway's.

Its owner removes it; if that was killed, the next one that makes such a directory does.
"""

import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp

# Locked for as long as any process lives that made or inherited the directory.
LOCK = "alive"


class SharedDirectory:
    """`path` is the directory, whose name begins with `prefix`. Forked processes inherit it; only the process that made
    it removes it.
    """

    def __init__(self, prefix: str) -> None:
        remove_abandoned(prefix)
        self._owner = os.getpid()
        self.path = Path(mkdtemp(prefix=prefix))
        made = self.path / "making"
        # Never closed, so the lock lasts until the last process that holds it ends.
        self._lock = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Renamed into place only once it is locked, so that no process sees an unlocked one.
        made.rename(self.path / LOCK)

    def remove(self) -> None:
        if os.getpid() == self._owner:
            shutil.rmtree(self.path, ignore_errors=True)


def remove_abandoned(prefix: str) -> None:
    """Remove this user's directories of this prefix whose processes were killed. A directory without a lock file is
    left alone.
    """
    for path in Path(gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
