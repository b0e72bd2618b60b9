"""Model families; each module defines one as `FAMILY`."""
