"""Takes docs/'s pictures of the finished page from the reference full run: `make screenshots`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from harness.record.store import load
from reports import write_report

ROOT = Path(__file__).parents[1]
SIZES = {
    "report": (1280, 1600, "light"),
    "report-dark": (1280, 1600, "dark"),
    "report-phone": (375, 812, "light"),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = write_report(load(ROOT / "results" / "reference"), Path(folder) / "report.html")
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, (width, height, scheme) in SIZES.items():
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )  # type: ignore[arg-type]
            page.goto(page_file.as_uri())
            page.screenshot(path=str(ROOT / "docs" / f"{name}.png"))
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
