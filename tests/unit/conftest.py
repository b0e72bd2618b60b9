"""Two results folders and their report pages, shared by several files."""

from __future__ import annotations

import json

import pytest

from harness.cell.cell import Cell
from harness.record.store import Results
from tests.unit.html_page import Page, page_of
from tests.unit.made_results import sharded, stored, typical


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    planned = json.loads(Cell(strategy="later", devices=2).model_dump_json())
    plan = json.dumps({"cells": [planned], "trials": 3, "order_seed": 7, "left_out": []})
    return stored(tmp_path_factory.mktemp("typical"), typical(), plan=plan)


@pytest.fixture(scope="module")
def page(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(results, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def sharded_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return stored(tmp_path_factory.mktemp("sharded"), sharded())


@pytest.fixture(scope="module")
def sharded_page(sharded_results: Results, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(sharded_results, tmp_path_factory.mktemp("sharded-page"))
