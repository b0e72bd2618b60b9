"""Predicts step time and memory before anything runs: `cluster` by closed forms for layouts on many
devices, `local` from this machine's own measurements, `rehearsal` by running a strategy's code."""
