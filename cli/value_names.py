"""The names of values in help: an option's value is N rather than a Python type; an argument's own name says enough."""

from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

_NAMES = {
    "<int>": "N",
    "<int range>": "N",
    "<float>": "X",
    "<float range>": "X",
    "<str>": "TEXT",
    "<path>": "PATH",
    # A flag takes no value.
    "<bool>": "",
}


class Command(TyperCommand):
    """A command whose help names no Python type, and whose errors do not say that they are of values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            # Pydantic, with which typer reads values, puts it before the messages of choices.
            error.message = error.message.removeprefix("Value error, ")
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        return _named(super().get_params(ctx), ctx)


class Group(TyperGroup):
    """As Command, for the command that contains the others."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _named(super().get_params(ctx), ctx)


def _no_type(ctx: Any) -> None:
    """Replaces an argument's type by nothing."""


def _named(parameters: list[Any], ctx: Any) -> list[Any]:
    for parameter in parameters:
        if parameter.param_type_name == "option" and parameter.metavar is None:
            name = parameter.display_type(ctx)
            # The rest are choices: "<fp8|w4a8>".
            parameter.metavar = _NAMES.get(name, name.strip("<>"))
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = _no_type
    return parameters
