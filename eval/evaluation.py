"""One evaluation from its options to its result."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eval import engine_scorer, report, results
from eval.answers import AnswerLog
from eval.endpoint import Endpoint
from eval.interview import interview, unanswered
from eval.options import EvalOptions
from eval.own_mesh import files_digest, grpc_endpoint, http_url, own_mesh
from eval.perplexity import NOT_OFFERED, Document, score_at, unscored
from eval.results import Result
from eval.suite import Question, questions
from eval.tables import percent
from launcher.composition import split_settings
from mesh.rpc.channel import Channels

RESULT_FILE, REPORT_FILE, ANSWERS_FILE, MESH_LOG_FILE = "result.json", "report.md", "answers.jsonl", "mesh.log"


async def named(options: EvalOptions) -> EvalOptions:
    """`options` with the name of the model that the endpoint serves, under which results are kept.

    Raises EndpointUnavailable, or UnknownModel if the endpoint does not serve the model that the options name.
    """
    if options.url is None:
        return options
    async with _endpoint(options, options.url) as endpoint:
        return options.model_copy(update={"served_model": await endpoint.choose_model()})


async def evaluate(options: EvalOptions, documents: Sequence[Document], console: Console) -> Result:
    """Ask questions that are not answered yet, score documents that are not scored yet, write result.json and
    report.md.

    options: as `named` returns them. Raises ConfigError if the directory holds answers to something else,
    CheckpointError, EndpointUnavailable, UnknownModel, ProcessFailed.
    """
    asked = questions(
        options.suite,
        options.seed,
        problems=options.problems,
        long_problems=options.long_problems,
        max_tokens=options.max_tokens,
    )
    with AnswerLog(options.directory / ANSWERS_FILE, _settings(options)) as log:
        work = _Evaluation(options, asked, documents, log, console)
        model = await (work.at_an_endpoint() if options.url else work.in_a_mesh())
        result = _result(options, model, asked, documents, log)
    results.save(result, options.directory / RESULT_FILE)
    (options.directory / REPORT_FILE).write_text(report.markdown(result), encoding="utf-8")
    return result


class _Evaluation:
    def __init__(
        self,
        options: EvalOptions,
        asked: Sequence[Question],
        documents: Sequence[Document],
        log: AnswerLog,
        console: Console,
    ) -> None:
        self._options = options
        self._asked = asked
        self._documents = documents
        self._log = log
        self._console = console

    async def at_an_endpoint(self) -> str:
        """Evaluate at the endpoint; returns the model's name there."""
        options = self._options
        assert options.url is not None and options.served_model is not None
        async with _endpoint(options, options.url) as endpoint:
            await self._interview(endpoint)
            with self._console.status("scoring held-out text"):
                await score_at(endpoint, unscored(self._documents, self._log), self._log)
        return options.served_model

    async def in_a_mesh(self) -> str:
        """Evaluate in a mesh of our own; returns the name under which the mesh serves the model."""
        options = self._options
        assert options.model_dir is not None
        waiting = unscored(self._documents, self._log)
        if unanswered(self._asked, self._log) or waiting:
            self._console.print(
                f"serving {options.model_dir} (log: {options.directory / MESH_LOG_FILE})", highlight=False
            )
            async with own_mesh(options.model_dir, options.settings, options.directory / MESH_LOG_FILE) as plan:
                async with _endpoint(options, http_url(plan)) as endpoint:
                    await endpoint.choose_model()
                    await self._interview(endpoint)
                token_ids = await engine_scorer.tokenize(grpc_endpoint(plan), waiting, Channels())
            # Score only after the mesh has stopped, because two copies of a large model would not fit.
            await self._score(waiting, token_ids)
        return options.name

    async def _interview(self, endpoint: Endpoint) -> None:
        with _progress(self._console) as progress:
            task = progress.add_task("asking", total=len(self._asked))

            def show() -> None:
                answers = self._log.answers.values()
                share = sum(answer.right for answer in answers) / max(1, len(answers))
                progress.update(task, completed=len(answers), description=f"{percent(share)} right")

            show()
            await interview(self._asked, endpoint, self._options, self._log, show)

    async def _score(self, documents: Sequence[Document], token_ids: Sequence[Sequence[int]]) -> None:
        if not documents:
            return
        settings = [
            f"engine.model_dir={json.dumps(str(self._options.model_dir))}",
            *(each for each in split_settings(self._options.settings)["decode"] if each.startswith("engine.")),
        ]
        with self._console.status("scoring held-out text"):
            scores = await engine_scorer.token_logprobs(token_ids, settings, self._options.directory)
        for document, logprobs in zip(documents, scores, strict=True):
            self._log.add(document.score(logprobs))


def _endpoint(options: EvalOptions, url: str) -> Endpoint:
    return Endpoint(url, options.served_model, options.api_key, options.timeout_s)


def _settings(options: EvalOptions) -> dict[str, Any]:
    """The settings that must be equal so that a run can go on where another stopped."""
    settings = options.what_answers_depend_on
    if options.model_dir is not None:
        settings["model_files"] = files_digest(options.model_dir)
    return settings


def _result(
    options: EvalOptions, model: str, asked: Sequence[Question], documents: Sequence[Document], log: AnswerLog
) -> Result:
    outcomes = results.outcomes_of(asked, log.answers)
    scored = [log.scores[document.name] for document in documents if document.name in log.scores]
    complete = len(scored) == len(documents)
    return Result(
        name=options.name,
        model=model,
        settings=options.what_answers_depend_on,
        scores=results.scores_of(outcomes),
        perplexity=results.perplexity_of(scored) if complete else None,
        without_perplexity=None if complete else NOT_OFFERED,
        outcomes=outcomes,
        documents=scored if complete else [],
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
