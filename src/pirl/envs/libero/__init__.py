"""LIBERO: language-conditioned manipulation with a Panda arm, in five suites of tasks (hf-libero, on robosuite)."""
