"""Model families: each module of this package is one, and defines it as `FAMILY`."""
