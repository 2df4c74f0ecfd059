"""What holds for every test."""

import atexit
import gc
import os
import re
import signal
import sys
from collections.abc import Sequence
from itertools import compress
from operator import not_
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.addresses import NOWHERE
from tests.support.budgets import TestSeconds
from tests.support.gpus import has_gpu
from tests.support.quick import is_quick
from tests.support.run_directory import run_directory

if TYPE_CHECKING:
    from execnet import XSpec

# In a new clone Hypothesis first makes a table of Unicode's characters, which takes a second or two of the test that
# happens to be the first, and on a busy machine anything takes long now and then.
# The same examples in each run, so that none fails by chance; `make soak` draws others.
settings.register_profile("shared", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# What `make soak` runs: thousands of examples where `make test` draws a hundred.
settings.register_profile("soak", settings.get_profile("shared"), derandomize=False, max_examples=5000)
settings.load_profile("shared")

# Before torch is imported: on a busy machine, compute threads that spin make a test take minutes
# (see worker.ranks.process). Matrices of tests are small, and a test runs on each core already: a second compute thread
# takes 1.5 times the processor time, and waits for a core besides.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# Each run, and each of the hundreds of processes that tests start, would compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Without a GPU, Triton's kernels run in its interpreter. Read when Triton is first imported, by whichever test that is.
if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

# What workers measure of themselves on a machine that tests keep busy must not stay in the user's cache. What Go has
# compiled may.
os.environ.setdefault("GOCACHE", str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "go-build"))
os.environ["XDG_CACHE_HOME"] = str(run_directory())

# A command that a test gives no address must not find a mesh that happens to run on this machine.
os.environ["DEEPMESH_GATEWAY"] = os.environ["DEEPMESH_SCHEDULER"] = NOWHERE

# The marks of all tests of a module.
_WHOLE_CHECK = re.compile(r"^pytestmark = (?:\[[^\]]*)?pytest\.mark\.check\(", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    # Budgets are for `make test`: a check is long because it has a mark of its own.
    if config.getoption("--check") is None and not config.getoption("--quick"):
        config.pluginmanager.register(TestSeconds())


def pytest_sessionstart() -> None:
    _end_in_order_when_told_to()
    # A shell lets what it starts in the background ignore Ctrl-C, and processes that tests start would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    # A server under test that listened for signals has put the default back.
    _end_in_order_when_told_to()
    # Every run draws the same tensors: a kernel that rounds another way than its definition does so in one draw of
    # thousands, which no tolerance worth having allows.
    if (torch := sys.modules.get("torch")) is not None:
        # torch.manual_seed takes a third of a millisecond to note who calls, for each kind of device that is not there.
        (torch.manual_seed if has_gpu() else torch.default_generator.manual_seed)(0)


def _end_in_order_when_told_to() -> None:
    """SIGTERM ends a run as Ctrl-C does: fixtures are torn down, and what was made for the run is removed."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # The next one kills, should something hang now.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Twice as many as there are cores. Tests of services wait most of their time, for processes and deadlines: three
    processes took 75 s of two cores in 136 s, four take 115 s.
    """
    return 2 * (os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence["XSpec"]) -> None:
    # Only here: most runs are of one process.
    from tests.support.forked_runners import fork_runners

    fork_runners(config, specs)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--check", metavar="NAME", help="run the tests marked check(NAME), and no others")
    parser.addoption("--quick", action="store_true", help="leave out what imports torch, starts processes or is slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Quick tests import no torch. A check imports only modules that have its mark: to import them all takes longer
    than most checks. `make test` imports none that is a check as a whole.
    """
    if collection_path.suffix != ".py":
        return None
    if config.getoption("--quick"):
        return not is_quick(collection_path) or None
    wanted, text = config.getoption("--check"), collection_path.read_text(encoding="utf-8")
    return (_WHOLE_CHECK.search(text) is not None if wanted is None else f'check("{wanted}")' not in text) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _select_tier(config, items)
    _skip_without_gpus(items)
    _keep_modules_together(items)


def pytest_collection() -> None:
    # What is imported stays: collections of garbage would visit all of it again and again, now and while tests run.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # Libraries in C++ complain at the end of objects that are not given up.
    atexit.register(gc.unfreeze)


def _select_tier(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test` runs what has no check mark, `make quick` nothing slow, `make check-NAME` what has that mark."""
    wanted = config.getoption("--check")
    left_out = ["slow", "gpu", "multi_gpu"] if config.getoption("--quick") else []
    chosen = [_check_of(item) == wanted and not any(map(item.get_closest_marker, left_out)) for item in items]
    if not all(chosen):
        config.hook.pytest_deselected(items=list(compress(items, map(not_, chosen))))
        items[:] = compress(items, chosen)


def _check_of(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker("check")
    return None if mark is None else str(mark.args[0])


def _skip_without_gpus(items: list[pytest.Item]) -> None:
    """Tests that need a GPU, or several (two, if their mark does not say how many), are skipped, visibly, where there
    are none; elsewhere they run one by one.
    """
    needed = {"gpu": 1, "multi_gpu": 2}
    marks = [(item, item.get_closest_marker(name), count) for item in items for name, count in needed.items()]
    marked = [(item, mark.args[0] if mark.args else count) for item, mark, count in marks if mark is not None]
    if not marked:
        return
    # Only here: most tests do without torch.
    import torch

    for item, count in marked:
        # Processes that run tests side by side would share the GPU's memory.
        item.add_marker(pytest.mark.xdist_group("gpu"))
        if torch.cuda.device_count() < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA device{'s' if count > 1 else ''}"))


def _keep_modules_together(items: list[pytest.Item]) -> None:
    """What a module's tests share, such as a mesh, is set up once: one of the processes runs all of them."""
    for item in items:
        shared = isinstance(item, pytest.Function) and any(
            definitions[-1].scope == "module" and definitions[-1].baseid
            for definitions in item._fixtureinfo.name2fixturedefs.values()
        )
        if shared and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
