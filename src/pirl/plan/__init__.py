"""`pirl plan`: estimates memory and time of a training run on any hardware, by compiling its real update for it."""
