"""The embedded environment: a planar tabletop in plain numpy."""
