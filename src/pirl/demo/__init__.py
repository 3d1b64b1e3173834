"""`pirl demo`: demonstrations, behaviour cloning, RL and its controls, evaluated on the same initial states."""
