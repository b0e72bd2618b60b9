from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable

from harness.host.gc_tuning import no_collections
from harness.host.packages import hide, show
from harness.workloads.catalog import families

with no_collections():
    import torch.distributed.tensor.parallel  # noqa: F401
    import transformers

    for family in families().values():
        getattr(transformers, family.model_class)  # imports a model's module on first use
transformers.utils.logging.set_verbosity_error()


def import_packages(names: Iterable[str]) -> None:
    """Imports packages; setup reports failures. Hides MLflow, which DeepSpeed's autotuner would
    import for two seconds."""
    hide("mlflow")
    try:
        with no_collections():
            for name in names:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    finally:
        show("mlflow")
