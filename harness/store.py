"""The public name of the store: `from harness.store import load`."""

from harness.record.store import Results, Store, TrialKey, load

__all__ = ["Results", "Store", "TrialKey", "load"]
