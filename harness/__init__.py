"""How one cell is run, measured, verified and recorded."""
