"""Meta-World: fifty tasks of one robot arm in MuJoCo, the real simulator with cameras that a CPU can afford."""
