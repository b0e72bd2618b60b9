"""The first minutes on a GPU: probes, a gate, lanes side by side, then what is timed alone.

`plan` reads the steps from plan.yaml, `driver` runs them, `report` keeps what each showed, and
`out_folder` writes everything worth keeping into one folder.
"""
