"""Facts about this machine: GPUs, cores, libraries, folders and processes."""
