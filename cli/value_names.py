"""What help calls the value of an option: N instead of a Python type's name."""

from typing import Any

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
    """A command whose options all have a name for their value."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _named(super().get_params(ctx), ctx)


class Group(TyperGroup):
    """The same of the command that has the others."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _named(super().get_params(ctx), ctx)


def _named(parameters: list[Any], ctx: Any) -> list[Any]:
    for parameter in parameters:
        if parameter.param_type_name == "option" and parameter.metavar is None:
            name = parameter.display_type(ctx)
            # What is left are choices: "<fp8|w4a8>".
            parameter.metavar = _NAMES.get(name, name.strip("<>"))
    return parameters
