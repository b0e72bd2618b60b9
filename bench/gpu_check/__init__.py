"""The first minutes on a GPU: probes, a gate, lanes side by side, then timed steps alone.

`steps` reads plan.yaml, `driver` runs it, `outcomes` records each step's result, and `out_folder`
collects them.
"""
