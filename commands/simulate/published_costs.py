"""Shows and writes a published table of costs, for which nothing runs."""

from pathlib import Path

from ...files.documents import write_atomic
from ...simulator.reproduce.costs import (
    COST_HEADINGS,
    MEANING,
    PaperCosts,
    cost_document,
    cost_rows,
    costs_to_csv,
    costs_to_markdown,
    counted,
)
from ...simulator.run.disk import writing
from ..terminal import printer


def show_costs(costs: PaperCosts, out: Path | None, *, as_json: bool) -> None:
    """Count them, write Markdown and CSV below ``out``, and print the table.

    Left out, the folder has the paper's name.
    """
    cells = counted(costs)
    folder = out or Path(costs.paper)
    with writing(folder, "cannot use it"):
        folder.mkdir(parents=True, exist_ok=True)
    markdown, values = folder / f"{costs.name}.md", folder / f"{costs.name}.csv"
    write_atomic(markdown, costs_to_markdown(costs, cells).encode(), 0o644)
    write_atomic(values, costs_to_csv(costs, cells).encode(), 0o644)
    if as_json:
        document = {"table": costs.path, "out": str(folder)}
        printer.show_json({**document, "values": [cost_document(cell) for cell in cells]})
        return
    printer.show(
        printer.PrintedTable(COST_HEADINGS, cost_rows(cells)),
        MEANING,
        f"Notes, and the same as Markdown and CSV: {markdown}, {values}",
    )
