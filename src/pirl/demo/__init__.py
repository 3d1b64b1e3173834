"""`pirl demo`: demonstrations, behaviour cloning, RL and its controls, measured on the same starts."""
