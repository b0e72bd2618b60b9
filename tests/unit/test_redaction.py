"""Secrets are never recorded, and a run's files stay in its folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness.cell.cell import Cell
from harness.cell.errors import Refused, UsageError
from harness.cell.redaction import REDACTED, redacted, secrets_of
from harness.launch.outcome import LOG_TAIL_BYTES, RankOutputs
from harness.record.run_record import RunRecord
from harness.record.store import Store
from harness.record.trial import TrialRecord
from harness.worker.spec import log_file, stacks_file
from tests.unit.made_results import run_row
from tests.unit.stored_trials import trial_row

SECRET = 'pl4nted-"quoted"/secret'


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", SECRET)


def test_values_are_known_by_the_names_of_their_variables() -> None:
    environment = {
        "HF_TOKEN": "abcdefgh1",
        "AWS_SECRET_ACCESS_KEY": "abcdefgh2",
        "DB_PASSWORD": "short",
        "TOKENIZERS_PARALLELISM": "false",
        "SSH_PRIVATE_KEY": "/home/me/.ssh/id_rsa",
        "GITHUB_PAT": "123456789",
        "PATH": "/usr/bin:/bin",
        "MONKEY": "not-a-secret",
    }
    assert secrets_of(environment) == ("abcdefgh1", "abcdefgh2")


KINDS_OF_NAMES = (
    "DB_PASS PASS SMTP_PASS_2 AWS_CREDENTIALS GOOGLE_CREDS SESSION_COOKIE AZURE_CONNECTION_STRING"
    " DB_CONN_STR SENTRY_DSN SLACK_WEBHOOK BENCH_NOTIFY_WEBHOOK_URL REQUEST_SIGNATURE AZURE_SAS"
    " PRESIGNED_URL SERVICE_JWT NETRC_AUTH MYSQL_PWD URL_SIG"
)


@pytest.mark.parametrize("name", KINDS_OF_NAMES.split())
def test_a_secret_is_known_by_the_kind_of_its_name(name: str) -> None:
    assert secrets_of({name: "hunter2-hunter2"}) == ("hunter2-hunter2",)


@pytest.mark.parametrize("name", ["COMPASS", "BYPASS_CACHE", "PASSES", "DESIGN", "CONFIG", "DSNAP"])
def test_other_names_are_no_secrets(name: str) -> None:
    assert secrets_of({name: "hunter2-hunter2"}) == ()


@pytest.mark.parametrize(
    "text",
    [
        "pass=hunter2-hunter2",
        'connect("db_pass=hunter2-hunter2;host=x")',
        '{"pass": "hunter2-hunter2"}',
        '{"credentials": "hunter2-hunter2"}',
        "Cookie: session=hunter2-hunter2; theme=dark",
        "set-cookie: sid=hunter2-hunter2",
        "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=hunter2-hunter2==",
        "Server=tcp:db;User=me;Pwd=hunter2-hunter2;",
        "Endpoint=sb://bus/;SharedAccessKey=hunter2-hunter2",
        "connection_string: hunter2-hunter2",
        "POST https://hooks.slack.com/services/T0/B0/hunter2-hunter2",
        "https://discord.com/api/webhooks/1/hunter2-hunter2 gave 404",
        "https://me.webhook.office.com/webhookb2/hunter2-hunter2/x",
        "GET https://b.s3.amazonaws.com/x?X-Amz-Signature=hunter2-hunter2&X-Amz-Expires=60",
        "https://b.s3.amazonaws.com/x?X-Amz-Credential=hunter2-hunter2%2F2026",
        "https://me.blob.core.windows.net/x?sv=2024&sig=hunter2-hunter2",
        "https://storage.googleapis.com/x?X-Goog-Signature=hunter2-hunter2",
        "https://f.azurewebsites.net/api/x?code=hunter2-hunter2",
        "Authorization: Basic hunter2-hunter2",
        "proxy-authorization: Digest hunter2-hunter2",
        "sent Basic aHVudGVyMi1odW50ZXIy",
        "curl -u me:hunter2-hunter2 host",
        "curl --user=me:hunter2-hunter2 host",
        "postgresql://me:hunter2-hunter2@host/db",
    ],
)
def test_a_secret_is_known_by_the_form_around_it(text: str) -> None:
    shown = redacted(text, ())
    assert "hunter2" not in shown
    assert "aHVudGVy" not in shown
    assert REDACTED in shown


@pytest.mark.parametrize(
    "secret",
    [
        "ghp_" + "a1" * 18,
        "github_pat_" + "a1" * 20,
        "hf_" + "aB" * 17,
        "sk-proj-" + "a1" * 20,
        "AKIA" + "A1" * 8,
        "glpat-" + "a1" * 10,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIB\nAA==\n-----END RSA PRIVATE KEY-----",
    ],
    ids=lambda secret: secret[:8],
)
def test_secrets_are_known_by_their_form(secret: str) -> None:
    for text in (f"could not push: {secret} is no longer valid", json.dumps({"reason": secret})):
        shown = redacted(text, ())
        assert secret[8:] not in shown
        assert REDACTED in shown
    assert json.loads(shown)["reason"] == REDACTED


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("fetch https://me:hunter2222@host/x", f"fetch https://{REDACTED}@host/x"),
        ("password=hunter2222 user=me", f"password={REDACTED} user=me"),
        ("Authorization: Bearer abcdefghij", f"Authorization: Bearer {REDACTED}"),
        ("tool --api-key abcdefghij --fast", f"tool --api-key {REDACTED} --fast"),
        ('{"hub_token": "abcdefghij"}', f'{{"hub_token": "{REDACTED}"}}'),
    ],
)
def test_secrets_are_known_by_the_word_before_them(text: str, shown: str) -> None:
    assert redacted(text, ()) == shown


@pytest.mark.parametrize(
    "text",
    [
        "rank 1: RuntimeError: expected 512 tokens, got 511 (token: 17)",
        "5,753 tokens/s; secret of speed; tcp://127.0.0.1:29500",
        '{"tokens": 4096, "access_key": 1234567890, "token": null}',
        "datasets:wikitext, key bias has a zero gradient",
        "second pass: forward and backward; Basic training; compass=northward; cookie",
        "git -c user:me --user abcdefgh; https://example.org/hooksmith?page=overview",
        '{"passwd": -0.12345678, "token": [[[[[[7]]]]]], "api_key": -Infinity}',
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redacted(text, ()) == text


def test_a_lone_surrogate_is_recorded_as_its_escape(tmp_path: Path) -> None:
    """Python decodes file names and output that are not UTF-8 like this; errors repeat them."""
    store = Store(tmp_path)
    store.write_run(RunRecord(**run_row(run_id="run-1")))
    store.write_trial(TrialRecord(**trial_row(Cell(strategy="single"), reason="no file \udcff")))
    assert store.load().trials["reason"][0] == "no file \\udcff"


@pytest.mark.usefixtures("planted")
def test_no_column_of_a_record_has_a_secret(tmp_path: Path) -> None:
    store, cell = Store(tmp_path), Cell(strategy="single")
    run = run_row(run_id="run-1") | {
        "host": SECRET,
        "matrix": f"/home/{SECRET}/m.yaml",
        "plan": json.dumps({"data": f"text:{SECRET}"}),
        "allocation": json.dumps({"name": SECRET}),
    }
    store.write_run(RunRecord(**run))
    texts = {"reason": SECRET, "log_tail": f"x{SECRET}y", "stacks": SECRET, "node_names": (SECRET,)}
    store.write_trial(TrialRecord(**trial_row(cell, **texts)))
    loaded = store.load()
    everything = loaded.runs.to_csv() + loaded.trials.to_csv()
    assert "pl4nted" not in everything
    assert loaded.trials["log_tail"][0] == f"x{REDACTED}y"
    assert json.loads(loaded.runs["plan"][0]) == {"data": f"text:{REDACTED}"}


@pytest.mark.usefixtures("planted")
def test_a_log_tail_begins_with_no_half_of_a_secret(tmp_path: Path) -> None:
    log_file(tmp_path, 0).write_text("x" * 9000 + SECRET + "y" * (LOG_TAIL_BYTES - 5))
    log_file(tmp_path, 1).write_bytes(b"\xff\xfe" + SECRET.encode() + b"\xff")
    stacks_file(tmp_path, 0).write_text(f"in {SECRET}")
    outputs = RankOutputs()
    outputs.read(str(tmp_path), [0, 1])
    assert len(outputs.logs[0]) <= LOG_TAIL_BYTES
    assert outputs.logs[0].endswith("y")
    for text in (*outputs.logs.values(), *outputs.stacks.values()):
        assert "secret" not in text
    assert REDACTED in outputs.logs[1]


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/b", "..", ".hidden", "a\0b", ""])
def test_a_run_is_named_so_that_its_files_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / "results")
    with pytest.raises(UsageError, match=re.escape(repr(name))):
        store.write_run(RunRecord(**(run_row(run_id="x") | {"run_id": name})))
    assert list(tmp_path.rglob("*")) == []


def test_a_matrix_does_not_choose_where_on_the_host_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.strategies._deepspeed import require_disk

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    inside, outside = tmp_path / "temporary" / "a", tmp_path / "project"
    outside.mkdir()
    require_disk("")
    require_disk(str(inside))
    inside.mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    for folder in (outside, inside / ".." / ".." / "project", inside / "link", Path("here")):
        with pytest.raises(Refused, match="PARALLELISM_BENCH_DISKS"):
            require_disk(str(folder))
    monkeypatch.setenv("PARALLELISM_BENCH_DISKS", f"/nowhere:{outside}")
    require_disk(str(outside / "below"))
