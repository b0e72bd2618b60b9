"""The first minutes on a GPU: probes, a gate, lanes side by side, then timed steps alone.

`steps` reads plan.yaml, `driver` runs it, `outcomes` records what each step showed, and
`out_folder` collects the results.
"""
