"""A chat template as most checkpoints publish it: a program in Jinja."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, meta

from gateway.prompts.template_environment import template_environment
from gateway.prompts.template_skills import TemplateSkills
from gateway.prompts.tokenizer import Tokenizer
from mesh.errors import ConfigError, InvalidRequest

TEMPLATE_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


class JinjaTemplate:
    def __init__(self, source: str, tokenizer: Tokenizer, clock: Callable[[], datetime] = datetime.now) -> None:
        """clock: the local time, for templates that write it into a prompt."""
        environment = template_environment(clock)
        try:
            self._template = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template does not parse: line {error.lineno}: {error.message}") from error
        self._tokenizer = tokenizer
        self.skills = TemplateSkills.of(source, variables, self.write, tokenizer.control_id)

    def write(self, variables: Mapping[str, Any]) -> str:
        """The prompt. Raises InvalidRequest if the template refuses the messages."""
        try:
            return self._template.render(
                add_generation_prompt=True,
                documents=None,
                bos_token=self._tokenizer.beginning or "",
                eos_token=self._tokenizer.end or "",
                **variables,
            )
        # A template is a program. Whatever its expressions raise for these messages counts as the request's fault.
        except TEMPLATE_FAULTS as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", field="messages") from error
