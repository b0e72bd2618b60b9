"""Fixtures for headless Chromium and for the full run in results/reference."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from harness.record.store import Results, load
from reports import write_report

CHROMIUM = shutil.which("chromium")
REFERENCE = Path(__file__).parents[2] / "results" / "reference"
# Stops Chromium's own requests, so that only the page's are seen.
QUIET = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CHROMIUM is None:
        for item in items:
            if "browser" in item.path.parts:
                item.add_marker(
                    pytest.mark.skip(reason="no Chromium: install Debian's package chromium")
                )


@pytest.fixture(scope="session")
def reference() -> Results:
    """A real run of matrix `full`."""
    return load(REFERENCE)


@pytest.fixture(scope="session")
def report(reference: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(reference, tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


class Watched:
    """An open page, and its messages and requests so far."""

    def __init__(self, context: BrowserContext, file: Path) -> None:
        self.requests: list[str] = []
        self.said: list[str] = []
        self.page: Page = context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on(
            "dialog",
            lambda dialog: (self.said.append(f"dialog: {dialog.message}"), dialog.dismiss()),
        )
        self.page.goto(file.as_uri())


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Opens a file in a new browser context: (file, width, height, more context settings)."""
    contexts = []

    def opened(file: Path, width: int = 1280, height: int = 900, **more: Any) -> Watched:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **more))
        return Watched(contexts[-1], file)

    yield opened
    for context in contexts:
        context.close()
