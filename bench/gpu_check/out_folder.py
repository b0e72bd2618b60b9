"""Results folder of a check: few files, always complete, small enough to send.

Steps write to a folder in the cache, from which a later call resumes.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu_check.outcomes import Report
from harness.host.folders import cache_folder
from harness.record.trial_status import WORST_FIRST
from harness.spec.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

MOST_BYTES = 15 * 2**20
"""Size limit of an archive."""
ARCHIVES = {"logs.tgz": "logs", "results.tgz": "results", "traces.tgz": "traces"}
"""Subfolder of the working folder, by archive."""
REPORT = "report.json"
MOST_OF_A_REASON = 160
"""Most characters of a reason in cells.txt."""


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Extracts files inside the folder; `extractall`'s filter needs Python 3.11.4."""
    for member in archive:
        target = (folder / member.name).resolve()
        if not (member.isfile() and target.is_relative_to(folder.resolve())):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source := archive.extractfile(member):
            with source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def write_whole(file: Path, content: bytes) -> None:
    temporary = file.with_name(".partial")
    temporary.write_bytes(content)
    temporary.replace(file)


@dataclass(frozen=True)
class Folders:
    out: Path
    work: Path

    @classmethod
    def prepare(cls, out: Path) -> Folders:
        """Creates both folders; raises UsageError if not writable."""
        folders = cls(out.resolve(), cache_folder() / "gpu-check")
        for folder in (folders.out, folders.work):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / ".partial").write_bytes(b"")
                (folder / ".partial").unlink()
            except OSError as error:
                raise UsageError(
                    f"{str(folder)!r} cannot be written: {error.strerror or error}"
                ) from None
        return folders

    @property
    def results(self) -> Path:
        return self.work / "results"

    @property
    def traces(self) -> Path:
        return self.work / "traces"

    def log(self, name: str) -> Path:
        return self.work / "logs" / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the working folder; raises UsageError during another check."""
        descriptor = os.open(self.work / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise UsageError(f"another GPU check is running in {str(self.work)!r}") from None
        finally:
            os.close(descriptor)

    def start(self, device: str) -> Report:
        """Empties the working folder; raises UsageError if a report exists."""
        if (self.out / REPORT).exists():
            raise UsageError(
                f"{str(self.out)!r} has the report of an earlier check: continue it with --resume,"
                " or name another folder with --out"
            )
        self._empty()
        return Report.new(device)

    def resume(self, device: str) -> Report:
        """Returns the folder's report, else this machine's last.

        Raises UsageError without one for this device.
        """
        kept = self.work / REPORT
        file = self.out / REPORT if (self.out / REPORT).exists() else kept
        if not file.exists():
            raise UsageError(f"--resume finds no report in {str(self.out)!r}")
        report = Report.read(file)
        if report.device != device:
            raise UsageError(
                f"--resume: the report in {str(file.parent)!r} is for device {report.device!r},"
                f" but this check is for {device!r}"
            )
        if file != kept and not (kept.exists() and Report.read(kept).check_id == report.check_id):
            # The report comes from another machine.
            self._empty()
            for name in ARCHIVES:
                if (self.out / name).exists():
                    with tarfile.open(self.out / name) as archive:
                        _extract(archive, self.work)
        return report

    def _empty(self) -> None:
        for name in ARCHIVES.values():
            shutil.rmtree(self.work / name, ignore_errors=True)
        (self.work / REPORT).unlink(missing_ok=True)

    def write_report(self, report: Report) -> None:
        for folder in (self.work, self.out):
            write_whole(folder / REPORT, report.to_json().encode())

    def collect(self) -> list[str]:
        """Writes tables and archives; returns names of files that are too large."""
        table = trials(self.results)
        if table is not None:
            write_whole(self.out / "cells.csv", table.to_csv(index=False).encode())
            write_whole(self.out / "cells.txt", "".join(f"{x}\n" for x in lines(table)).encode())
        left_out = []
        for name, folder in ARCHIVES.items():
            content, too_large = packed(self.work, folder)
            left_out += too_large
            if content:
                write_whole(self.out / name, content)
        return left_out


def packed(home: Path, folder: str, most_bytes: int = MOST_BYTES) -> tuple[bytes, list[str]]:
    """Returns a folder as tar.gz, and names of large files left out."""
    files: dict[str, bytes] = {}
    for file in sorted((home / folder).rglob("*")):
        with contextlib.suppress(OSError):  # a step removes its temporary files
            if file.is_file() and not file.name.endswith((".tmp", ".lock")):
                files[str(file.relative_to(home))] = file.read_bytes()
    left_out: list[str] = []
    while files:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=4) as archive:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        if buffer.tell() <= most_bytes:
            return buffer.getvalue(), left_out
        left_out.append(max(files, key=lambda name: len(files[name])))
        del files[left_out[-1]]
    return b"", left_out


def trials(results: Path) -> pd.DataFrame | None:
    from harness.record.store import Store

    try:
        table = Store(results).load(steps=False).trials
    except (UsageError, OSError):  # no run yet
        return None
    if table.empty:
        return None
    order = {status: place for place, status in enumerate(WORST_FIRST)}
    order["diverged parity"] = order["diverged"]
    judged = table["status"].where(table["parity_verdict"] != "diverged", "diverged parity")
    return table.iloc[judged.map(order).argsort(kind="stable")]


def lines(table: pd.DataFrame) -> list[str]:
    """Returns a line per trial, and one of cells that did not run."""
    import pandas as pd

    def number(value: object, form: str) -> str:
        known = isinstance(value, float | int) and not pd.isna(value)
        return format(value, form) if known else "-"

    texts = []
    for row in table.to_dict("records"):
        bad = row["status"] != "ok" or row["parity_verdict"] == "diverged"
        reason = str(row["reason"] or row["parity_reason"] or "")[:MOST_OF_A_REASON] if bad else ""
        texts.append(
            f"{row['status']:13s} {row['parity_verdict'] or '-'!s:17s}"
            f" loss {number(row['parity_max_loss_deviation'], '.1e')}"
            f" update {number(row['parity_max_update_deviation'], '.1e')}"
            f" (noise {number(row['reference_update_noise'], '.1e')})"
            f" step {number(row['step_seconds_p50'], '.3f')} s"
            f" MFU {number(row['mfu'], '.2f')} wall {number(row['wall_seconds'], '.1f')} s"
            f" {row['cell_name']} {reason}".rstrip()
        )
    return list(dict.fromkeys(texts))
