"""Publishes results to common tools through their own client libraries."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from harness.spec.errors import UsageError

if TYPE_CHECKING:
    from harness.record.store import Results
from reports.publish.published import Published, quiet

LIBRARIES = {
    "tensorboard": "torch.utils.tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "prometheus": "prometheus_client",
}
"""Library of each target; the extra is named after the target."""


def publish(target: str, results: Results, folder: Path) -> Published:
    """Writes runs to a folder in the target's format.

    Raises UsageError if the library is missing or the folder cannot be written.
    """
    need(target)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is a file; name the folder that {target} is to read")
    if target == "tensorboard":
        from reports.publish.event_files import write
    elif target == "mlflow":
        from reports.publish.file_store import write
    elif target == "wandb":
        from reports.publish.offline_runs import write
    else:
        from reports.publish.textfile import write
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return write(results, folder)
    except OSError as error:
        raise UsageError(
            f"{str(folder)!r} cannot be written ({error.strerror}); name another folder"
        ) from None


def need(target: str) -> None:
    """Raises UsageError if the target's library is missing."""
    library = LIBRARIES[target]
    try:
        with quiet():
            importlib.import_module(library)
    except ImportError as error:
        how = f"pip install 'parallelism-bench[{target}]'"
        raise UsageError(
            f"publishing for {target} needs the package {library}, which cannot be imported here"
            f" ({error}): {how}"
        ) from None
