"""The requests of OpenAI's clients.

Bodies are decoded directly into these types, so a body of 16 MiB is not also held as a tree of objects.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Literal, cast

from msgspec import Struct, structs

from gateway.asks import Ask, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from gateway.openai.chat_messages import Message, chat_messages
from gateway.openai.constraints import ConstraintFields
from gateway.openai.tools import ChoiceBody, ToolBody, ToolChoice, keep_tools, toolbox
from gateway.prompts.chat import TemplateOptions
from gateway.requests import OUR_NAMES, FieldNames
from gateway.tools import check_tool_count
from mesh.domain.sampling import check_alternatives
from mesh.errors import InvalidRequest

# OpenAI's own default.
DEFAULT_COMPLETION_TOKENS = 16
# Answers that one request may ask for.
MAX_CHOICES = 128


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    # Whether every chunk reports the tokens so far.
    continuous_usage_stats: bool | None = None
    # Accepted and ignored: OpenAI pads chunks so that their lengths reveal nothing; we do not.
    include_obfuscation: bool | None = None


class GenerationBody(ConstraintFields, kw_only=True):
    """The fields that chats and completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    # Whether to report token ids with the text.
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    # Answers to each prompt; they share the prompt's computation.
    n: int | None = None
    # Texts that the answer must not contain.
    bad_words: list[str] | None = None
    # The model cannot end the answer before this many tokens.
    min_tokens: int | None = None
    # Report the prompt's log probabilities, with this many alternatives. The whole prompt is then computed, without
    # cached prefixes.
    prompt_logprobs: int | None = None
    # Keep this many of the prompt's last tokens; -1 keeps as many as the context has room for.
    truncate_prompt_tokens: int | None = None

    @property
    def streams_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def streams_usage_continuously(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def choices_per_prompt(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def chosen_per_prompt(self) -> int | None:
        """How many of the answers to each prompt are returned; None returns all."""
        return None

    @property
    def hides_logprobs(self) -> bool:
        """Whether log probabilities are used only to choose among answers."""
        return False

    @property
    def echo_logprobs(self) -> int | None:
        """Number of alternatives for the prompt's tokens in the logprobs of a text that begins with the prompt; None if
        they are not reported there.
        """
        return None

    def asks(self, request_id: str) -> list[Ask]:
        if self.n is not None and self.n < 1:
            raise InvalidRequest(f"n must be at least 1, not {self.n}", field="n")
        if self.prompt_logprobs is not None and self.streams:
            raise InvalidRequest("prompt_logprobs come with whole answers: do not stream", field="prompt_logprobs")
        answers = self.prompt_count * self.choices_per_prompt
        if answers > MAX_CHOICES:
            raise InvalidRequest(f"{answers} answers are asked for, the limit is {MAX_CHOICES}", field="n")
        return self._asks(request_id)

    @abstractmethod
    def _asks(self, request_id: str) -> list[Ask]: ...

    def _ask(
        self,
        request_id: str,
        prompt: Prompt,
        top_logprobs: int | None,
        max_tokens: int | None,
        names: FieldNames = OUR_NAMES,
    ) -> Ask:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return Ask(
            request_id=request_id,
            model=self.model,
            prompt=prompt,
            sampling=self.sampling(top_logprobs),
            max_tokens=max_tokens,
            names=names,
            stop_strings=tuple(stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop_string=bool(self.include_stop_str_in_output),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            cache_salt=self.cache_salt,
            priority=self.priority or 0,
            sparse_prefill=self.sparse_prefill,
            form=self.form(),
            bad_words=tuple(self.bad_words or ()),
            min_tokens=self.min_tokens or 0,
        )


class TemplateFields(Struct, forbid_unknown_fields=True):
    """Variables of the chat template. `thinking` is DeepSeek's name, `enable_thinking` Qwen's."""

    thinking: bool | None = None
    enable_thinking: bool | None = None

    def settled(self) -> bool | None:
        given = {self.thinking, self.enable_thinking} - {None}
        if len(given) > 1:
            field = "chat_template_kwargs.enable_thinking"
            raise InvalidRequest("thinking and enable_thinking contradict each other: send one", field=field)
        return next(iter(given), None)


def template_options(fields: TemplateFields | None, reasoning_effort: str | None = None) -> TemplateOptions:
    """Effort "none" turns reasoning off, any other turns it on, unless the template's own fields say otherwise."""
    thinking = None if fields is None else fields.settled()
    if thinking is None and reasoning_effort is not None:
        thinking = reasoning_effort != "none"
    return TemplateOptions(thinking, reasoning_effort)


class ChatCompletionBody(GenerationBody, kw_only=True):
    messages: list[Message]
    chat_template_kwargs: TemplateFields | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    max_completion_tokens: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def take(self, content: bytes) -> None:
        if self.tools:
            keep_tools(self.tools, content)

    def _asks(self, request_id: str) -> list[Ask]:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", field="top_logprobs")
        options = template_options(self.chat_template_kwargs, self.reasoning_effort)
        messages = chat_messages(self.messages)
        choice = self.tool_choice.to_choice() if isinstance(self.tool_choice, ChoiceBody) else self.tool_choice
        check_tool_count(len(self.tools or ()))
        tools = [tool.to_tool(f"tools[{index}]") for index, tool in enumerate(self.tools or ())]
        prompt = ChatPrompt(messages, options, toolbox(tools, choice, self.parallel_tool_calls))
        top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        names, max_tokens = FieldNames("messages"), self.max_tokens
        if self.max_completion_tokens is not None:
            names, max_tokens = FieldNames("messages", "max_completion_tokens"), self.max_completion_tokens
        return [self._ask(request_id, prompt, top_logprobs, max_tokens, names)]


class CompletionBody(GenerationBody, kw_only=True):
    # Text, token ids, or a list of either.
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    # Whether the answer's text begins with the prompt.
    echo: bool | None = None
    # Answers that are generated for each prompt; the n likeliest are returned.
    best_of: int | None = None

    @property
    def prompt_count(self) -> int:
        """Number of prompts, judged by the first entry alone; `_prompts` refuses a list that mixes kinds."""
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return 1 if is_one else len(self.prompt)

    @property
    def choices_per_prompt(self) -> int:
        return super().choices_per_prompt if self.best_of is None else self.best_of

    @property
    def chosen_per_prompt(self) -> int | None:
        n = super().choices_per_prompt
        return None if self.best_of in (None, n) else n

    @property
    def echo_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def hides_logprobs(self) -> bool:
        return self.chosen_per_prompt is not None and self.logprobs is None

    def _asks(self, request_id: str) -> list[Ask]:
        self._check_choice()
        check_alternatives("logprobs", self.logprobs)
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        logprobs = 0 if self.hides_logprobs else self.logprobs
        asks = [
            self._ask(f"{request_id}.{index}" if index else request_id, prompt, logprobs, max_tokens)
            for index, prompt in enumerate(self._prompts())
        ]
        return [self._echoing(ask) for ask in asks] if self.echo else asks

    def _echoing(self, ask: Ask) -> Ask:
        """`ask`, with the prompt at the beginning of its answer; if logprobs are asked for, the prompt's tokens get
        them too.
        """
        wanted = [each for each in (self.echo_logprobs, self.prompt_logprobs) if each is not None]
        return replace(
            ask, echo=True, sampling=structs.replace(ask.sampling, prompt_logprobs=max(wanted, default=None))
        )

    def _check_choice(self) -> None:
        n = super().choices_per_prompt
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequest(f"best_of must be at least n ({n}), not {self.best_of}", field="best_of")
        if self.chosen_per_prompt is not None and self.streams:
            raise InvalidRequest("best_of knows the best answer only at the end: do not stream", field="best_of")

    def _prompts(self) -> list[Prompt]:
        if isinstance(self.prompt, str):
            return [TextPrompt(self.prompt)]
        kinds = set(map(type, self.prompt))
        if kinds <= {int}:
            return [TokenPrompt(cast(list[int], self.prompt))]
        if len(kinds) > 1:
            raise InvalidRequest("prompt mixes texts and token ids: send one kind", field="prompt")
        return [
            TextPrompt(each) if isinstance(each, str) else TokenPrompt(cast(list[int], each)) for each in self.prompt
        ]
