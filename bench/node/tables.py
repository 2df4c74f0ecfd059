"""Tables of the results of `bench.node`."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from bench.node.rows import Row

COLUMNS = ("layout", "requests", "step ms", "floor ms", "wire ms", "ratio", "sustained", "idle")
LAYER_COLUMNS = ("exchange us a layer", "routed us a layer", "agreement us")
DRAFT_COLUMNS = ("requests", "drafts", "accepted")
RATE_COLUMNS = ("tokens a step", "of a request, tokens/s", "of the node, tokens/s", "prompts of a rank, tokens/s")
SERVED_COLUMNS = ("served: TPOT ms", "requests/min of a rank", "of the node")
LARGEST_GROUPS = 9
OUTPUT_TOKENS = 1000


def steps_table(rows: Sequence[Row]) -> Table:
    case = rows[0].case
    shown = Table(title=f"{case.layers} layers of DeepSeek-R1, {case.experts} experts, {case.kv} KV")
    for column in (*COLUMNS, *LAYER_COLUMNS):
        shown.add_column(column, justify="right")
    for row in rows:
        times = (row.step_ms, row.floor_ms, row.wire_ms, row.ratio, row.sustained_ratio)
        layer = (row.exchange_us, row.routed_us, row.agreement_us)
        cells = [*(f"{each:.2f}" for each in times), f"{row.idle_share:.1%}", *(f"{each:.1f}" for each in layer)]
        shown.add_row(row.case.layout, str(row.case.requests), *cells)
    return shown


def rates_table(rows: Sequence[Row], batching_ranks: int) -> Table:
    """batching_ranks: how many ranks of the node have requests; each has as many as a row says."""
    shown = Table(title="tokens with the steps above, and requests served")
    for column in (*DRAFT_COLUMNS, *RATE_COLUMNS, *SERVED_COLUMNS):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(str(row.case.requests), *_draft_cells(row), *_rate_cells(row, batching_ranks))
    return shown


def _draft_cells(row: Row) -> Iterator[str]:
    yield f"{row.drafts:.1f}"
    yield " ".join(map(str, row.case.acceptance))


def _rate_cells(row: Row, batching_ranks: int) -> Iterator[str]:
    yield f"{row.tokens:.2f}"
    yield f"{row.request_rate:.1f}"
    yield f"{row.request_rate * row.case.requests * batching_ranks:,.0f}"
    yield f"{row.prompt_rate:,.0f}"
    token_ms, per_minute = row.served(OUTPUT_TOKENS)
    yield f"{token_ms:.1f}"
    yield f"{per_minute:.1f}"
    yield f"{per_minute * batching_ranks:.1f}"


def breakdown(rows: Sequence[Row]) -> Table:
    shown = Table("ms of a step on the device", title="by kernel")
    names = dict.fromkeys(name for row in rows for name in list(row.breakdown)[:LARGEST_GROUPS])
    for row in rows:
        shown.add_column(str(row.case.requests), justify="right")
    for name in names:
        shown.add_row(name, *(f"{row.breakdown.get(name, 0) / 1000:.3f}" for row in rows))
    return shown
