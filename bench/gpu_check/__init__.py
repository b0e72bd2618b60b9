"""The first minutes on a GPU: probes, a gate, lanes side by side, then timed steps alone."""
