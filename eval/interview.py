"""Puts questions to an endpoint, several at once, and writes the judged answers down."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

from eval.answers import Answer, AnswerLog
from eval.endpoint import Completion, Endpoint, Sampling
from eval.options import EvalOptions
from eval.suite import Question
from eval.tasks import grade
from mesh.errors import ConfigError, InvalidRequest


def unanswered(questions: Sequence[Question], log: AnswerLog) -> list[Question]:
    """The questions to which the log has no answer. Raises ConfigError if the log has an id with another question."""
    for question in questions:
        known = log.answers.get(question.id)
        if known is not None and known.digest != question.digest:
            raise ConfigError(
                f"the problems have changed since {question.id} was answered: name another directory with --out, "
                "or delete this one"
            )
    return [question for question in questions if question.id not in log.answers]


async def interview(
    questions: Sequence[Question],
    endpoint: Endpoint,
    options: EvalOptions,
    log: AnswerLog,
    on_answer: Callable[[], None],
) -> None:
    """Ask the questions that are not answered yet. Raises EndpointUnavailable; earlier answers stay in the log."""
    waiting = iter(unanswered(questions, log))
    askers = [
        asyncio.create_task(_ask_in_turn(waiting, endpoint, options, log, on_answer))
        for _ in range(options.concurrency)
    ]
    try:
        await asyncio.gather(*askers)
    finally:
        for asker in askers:
            asker.cancel()
        await asyncio.gather(*askers, return_exceptions=True)


async def _ask_in_turn(
    waiting: Iterator[Question],
    endpoint: Endpoint,
    options: EvalOptions,
    log: AnswerLog,
    on_answer: Callable[[], None],
) -> None:
    for question in waiting:
        answer = await _ask(question, endpoint, options)
        log.add(answer)
        on_answer()


async def _ask(question: Question, endpoint: Endpoint, options: EvalOptions) -> Answer:
    sampling = Sampling(options.temperature, options.top_p, _seed(options.seed, question.id))
    try:
        completion = await endpoint.chat(question.problem.prompt, question.max_tokens, sampling)
    except InvalidRequest as error:
        return Answer(question.id, question.digest, False, "refused", 0, 0, error.message, "")
    return _judged(question, completion)


def _judged(question: Question, completion: Completion) -> Answer:
    return Answer(
        question=question.id,
        digest=question.digest,
        right=grade(question.problem, completion.content),
        ending="length" if completion.cut_off else "stop",
        prompt_tokens=completion.prompt_tokens,
        answer_tokens=completion.answer_tokens,
        content=completion.content,
        reasoning=completion.reasoning,
    )


def _seed(seed: int, question: str) -> int:
    """A seed for the question, of 31 bits, which every server accepts."""
    return int.from_bytes(blake2b(f"{seed}/{question}".encode(), digest_size=4).digest(), "little") >> 1
