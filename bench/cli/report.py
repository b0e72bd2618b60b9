"""bench report: the HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[list[str] | None, typer.Argument(help="Run ids, one page each; the newest run where none is given.")] = None,
    results: Annotated[Path, typer.Option("--results", help="Folder that the runs are in.")] = Path("results"),
    out: Annotated[Path | None, typer.Option("--out", help="HTML file to write (of one run); else reports/html/RUN.html.")] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")] = False,
) -> None:
    """Writes the HTML report of a run. Example: [bold]python -m bench report --open[/bold]"""
    import json

    from harness.errors import Mistake
    from harness.store import Store
    from reports import write_report

    store = Store(results)
    wanted = list(dict.fromkeys(run or store.run_ids()[-1:]))
    if out is not None and len(wanted) > 1:
        raise Mistake(f"--out names one file, but {len(wanted)} runs were given; leave it out to write reports/html/RUN.html for each")
    if out is not None and out.is_dir():
        raise Mistake(f"--out {str(out)!r} is a folder; name the HTML file, such as {str(out / 'report.html')!r}")
    loaded = [store.load([run_id], steps=False) for run_id in wanted] or [store.load()]
    pages = []
    for run_id, one in zip(wanted, loaded, strict=True):
        path = out or Path("reports") / "html" / f"{run_id}.html"
        pages.append(write_report(one, path))
    if json_output:
        print(json.dumps({"report": str(pages[0]), "reports": [str(page) for page in pages], "runs": wanted}))
    else:
        for page in pages:
            print(page)
    if open_browser:
        for page in pages:
            typer.launch(page.resolve().as_uri())
