"""The first minutes on a GPU: probes, a gate, lanes side by side, then timed steps alone.

`steps` reads the steps from plan.yaml, `driver` runs them, `outcomes` records what each showed, and
`out_folder` collects the results in one folder.
"""
