"""The GPU paths, proved without a GPU; each test says which finding of the reading of these paths
it guards."""
