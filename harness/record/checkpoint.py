"""Manifest of a checkpoint, which reveals damaged files, and its costs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.cell.durable import file_digest
from harness.cell.errors import BadCheckpoint
from harness.cell.yaml_text import parsed

NAME = "manifest.json"


@dataclass(frozen=True)
class SavedFile:
    path: str
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    step: int
    ranks: int
    files: tuple[SavedFile, ...]

    @classmethod
    def of(cls, folder: Path, step: int, ranks: int) -> Manifest:
        names = sorted(path.relative_to(folder).as_posix() for path in _files(folder))
        files = tuple(
            SavedFile(name, (folder / name).stat().st_size, file_digest(folder / name))
            for name in names
        )
        return cls(step, ranks, files)

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def write(self, folder: Path) -> None:
        temporary = folder / f"{NAME}.tmp"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(folder / NAME)

    @classmethod
    def verified(cls, folder: Path) -> Manifest:
        """Reads a manifest and checks all files against it. Raises BadCheckpoint if a file
        differs."""
        try:
            manifest = parsed(Manifest, (folder / NAME).read_text())
        except FileNotFoundError:
            raise BadCheckpoint("it has no manifest, so the save did not finish") from None
        except ValueError:
            raise BadCheckpoint(f"{NAME} is not a valid manifest") from None
        for file in manifest.files:
            path = folder / file.path
            if not path.is_file():
                raise BadCheckpoint(f"{file.path} is missing")
            if path.stat().st_size != file.size:
                raise BadCheckpoint(
                    f"{file.path} has {path.stat().st_size} bytes instead of {file.size}"
                )
            if file_digest(path) != file.digest:
                raise BadCheckpoint(f"{file.path} has changed since it was saved")
        return manifest


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and p.name not in (NAME, f"{NAME}.tmp")]
