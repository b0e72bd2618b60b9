"""Clock, memory, FLOPs: each file answers one question."""
