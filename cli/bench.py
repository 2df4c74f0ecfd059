"""`deepmesh bench`: open-loop load against any endpoint."""

from pathlib import Path
from typing import Annotated

import typer

from cli.endpoints import GATEWAY, ApiKeyOption, MaybeGatewayOption
from mesh.config_values import validate
from mesh.launch import EXIT_FAILED


def bench(
    rate: Annotated[
        float,
        typer.Option(
            help="Mean arrivals a second (Poisson); inf sends all at once. Of a trace: how many times as fast as"
            " recorded."
        ),
    ] = 1.0,
    isl: Annotated[int, typer.Option(help="Tokens of a synthetic prompt.")] = 512,
    osl: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with messages or prompt, text with one prompt a line, a trace in Mooncake's format; or"
            " tasks, or sessions."
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="An OpenAI API, e.g. http://127.0.0.1:8000/v1.")] = None,
    endpoint: MaybeGatewayOption = None,
    model: Annotated[str | None, typer.Option(help="By default the first that the endpoint lists.")] = None,
    api_key: ApiKeyOption = None,
    requests: Annotated[
        int | None, typer.Option(help="How many; of sessions: how many sessions. By default the dataset, or 100.")
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of arrivals, instead of --requests.")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests in flight at once.")] = None,
    range_ratio: Annotated[float, typer.Option(help="Spread of isl and osl, in [0, 1).")] = 0.0,
    prefixes: Annotated[
        int | None, typer.Option(help="Distinct shared prefixes of the prompts. By default 0; of sessions 4.")
    ] = None,
    prefix_length: Annotated[
        int | None, typer.Option(help="Tokens of each prefix, part of isl. By default 0; of sessions half of isl.")
    ] = None,
    turns: Annotated[int, typer.Option(help="Requests of a session.")] = 4,
    think: Annotated[float, typer.Option(help="Mean seconds between an answer and the session's next request.")] = 5.0,
    turn_tokens: Annotated[int, typer.Option(help="Tokens that each later request of a session adds.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Equal seeds draw equal arrivals and prompts.")] = 0,
    ttft_slo_ms: Annotated[float | None, typer.Option(help="Objective that goodput is judged by.")] = None,
    tpot_slo_ms: Annotated[float | None, typer.Option(help="Objective that goodput is judged by.")] = None,
    find_rate: Annotated[
        bool,
        typer.Option(
            "--find-rate",
            help="From --rate on, find the highest at which --good-share of the requests keeps the objectives (by"
            " default the first token in 2 s, then one every 50 ms); each is tried for --duration (by default 60), and"
            " for 30 requests at least.",
        ),
    ] = False,
    good_share: Annotated[float, typer.Option(help="For --find-rate, in (0, 1].")] = 0.9,
    output: Annotated[
        Path | None, typer.Option(help="JSON report; the plot lies next to it. By default out/load-<time>.json.")
    ] = None,
) -> None:
    """Send requests at their own pace, however earlier ones fare, and report latency and goodput.

    The exit status is 1 if no request was answered completely.
    """
    from loadgen.options import LoadOptions
    from loadgen.run import main

    values = {
        "url": url,
        "grpc": None if url else endpoint or GATEWAY,
        "model": model,
        "api_key": api_key,
        "rate": rate,
        "requests": requests,
        "duration_s": duration,
        "max_concurrency": max_concurrency,
        "seed": seed,
        "isl": isl,
        "osl": osl,
        "range_ratio": range_ratio,
        "prefixes": prefixes,
        "prefix_length": prefix_length,
        "turns": turns,
        "think_s": think,
        "turn_tokens": turn_tokens,
        "dataset": dataset,
        "temperature": temperature,
        "ttft_slo_ms": ttft_slo_ms,
        "tpot_slo_ms": tpot_slo_ms,
        "find_rate": find_rate,
        "good_share": good_share,
        "output": output,
    }
    report = main(validate(LoadOptions, values, "bench"))
    if not report.summary.completed:
        raise typer.Exit(EXIT_FAILED)
