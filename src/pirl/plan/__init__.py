"""`pirl plan`: whether a run fits a machine, by compiling its update for it."""
