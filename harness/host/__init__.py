"""What this machine has: GPUs, cores, libraries, folders and processes."""
