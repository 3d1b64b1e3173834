"""Hyperparameter search by successive halving: many short trials, and longer ones for the best."""
