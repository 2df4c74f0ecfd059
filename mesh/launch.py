"""Common start of every service's `__main__`: arguments, configuration, logs, event loop, and errors in one line."""

import argparse
import gc
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import uvloop
from grpc import StatusCode

from mesh.background import background
from mesh.config import ServiceConfig
from mesh.config_values import load
from mesh.errors import ConfigError, MeshError
from mesh.memory.freed_memory import release_grown_memory
from mesh.observe.logs import configure
from mesh.processes.open_files import raise_limit
from mesh.processes.signals import end_on_signals
from mesh.processes.standard_streams import complain, settle

# Overrides as a JSON list of KEY=VALUE; those of the command line are applied after them.
SETTINGS_VARIABLE = "DEEPMESH_SETTINGS"
EXIT_FAILED = 1
# Starting again cannot help: the configuration or the checkpoint is wrong.
EXIT_USELESS_TO_RETRY = 2

ConfigT = TypeVar("ConfigT", bound=ServiceConfig)


@dataclass(frozen=True, slots=True)
class Program:
    """Another service, as a program: `python -m module` with these settings (KEY=VALUE) and environment variables."""

    module: str
    settings: Sequence[str]
    environment: Mapping[str, str]

    def command(self, *options: str) -> list[str]:
        """Its command line. Others can read it, so it contains no settings."""
        # The program must import the same code as this process.
        path_rule = ["-P"] if sys.flags.safe_path else []
        return [sys.executable, *path_rule, "-m", self.module, *options]

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        return {**inherited, SETTINGS_VARIABLE: json.dumps(list(self.settings)), **self.environment}

    def replace_this(self, *options: str) -> NoReturn:
        """Replace this process by the program, which keeps the children and the inheritable descriptors."""
        logging.shutdown()
        os.execve(sys.executable, self.command(*options), self.variables(os.environ))


def launch(
    service: str,
    config_model: type[ConfigT],
    main: Callable[[ConfigT], Coroutine[Any, Any, Program | None]],
    arguments: Sequence[str] | None = None,
    divide: Callable[[ConfigT], ConfigT] | None = None,
) -> int:
    """Run `main(config)` to its end and return the process's exit status, as in `sys.exit(launch("scheduler", ...))`.

    divide: may fork, before anything else runs; returns this process's configuration.

    A MeshError becomes one line on stderr, and status 2 if starting again cannot help, otherwise 1. If `main` returns a
    Program, it replaces this process.
    """
    settle()
    raise_limit()
    end_on_signals()
    options = _parse(service, arguments)
    try:
        first, *overlays = options.config or [None]
        config = load(config_model, first, (*settings_of_environment(), *options.set), overlays=overlays)
        if options.check:
            sys.stdout.write(config.model_dump_json() + "\n")
            return 0
        if divide is not None:
            config = divide(config)
        configure(service, config.observe)
        # Objects made so far live as long as the process: garbage collections need not visit them.
        gc.collect()
        gc.freeze()
        try:
            uvloop.run(_run(main, config))
        finally:
            # An error's line is the last.
            logging.shutdown()
    except MeshError as error:
        complain(f"{service}: {error.message}")
        return EXIT_USELESS_TO_RETRY if error.code is StatusCode.FAILED_PRECONDITION else EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + 2
    return 0


async def _run(main: Callable[[ConfigT], Coroutine[Any, Any, Program | None]], config: ConfigT) -> None:
    async with background(release_grown_memory()):
        following = await main(config)
    if following is not None:
        # Do this before the loop ends: its end would kill the processes that were started in it.
        following.replace_this()


def settings_of_environment() -> list[str]:
    """Settings that others must not read on a command line. The variable is removed, so that child processes lack
    it. Raises ConfigError.
    """
    text = os.environ.pop(SETTINGS_VARIABLE, "[]")
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{SETTINGS_VARIABLE} must be a JSON list of KEY=VALUE") from error


def _parse(service: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {_module() or service}")
    parser.add_argument(
        "--config",
        action="append",
        type=Path,
        metavar="PATH",
        help="YAML file; without it, every default. Given again, each file is laid over those before",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key, e.g. server.port=8002"
    )
    parser.add_argument(
        "--check", action="store_true", help="print the configuration as JSON, without its secrets, and end"
    )
    return parser.parse_args(arguments)


def _module() -> str:
    """The module that `python -m` ran: a folder with a `__main__`; empty if the process was started differently."""
    specification = getattr(sys.modules["__main__"], "__spec__", None)
    return "" if specification is None else specification.name.removesuffix(".__main__")
