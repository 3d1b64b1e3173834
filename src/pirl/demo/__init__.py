"""`pirl demo`: demonstrations, behavior cloning, RL and its controls, evaluated on the same initial states."""
