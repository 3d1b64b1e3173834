"""Where the seeds of episodes lie: those that are measured, and far from them those that RIPT practises from."""

SEEDS_APART, TASKS_APART = 1_000_000, 10_000
"""How far the seeds of evaluations, or of curricula, lie apart, and in them those of tasks. Each task counts from a round
number, because some environments choose one of a number of initial states by the seed."""

FIRST_SEED, SEEDS = 1_000_000_000, 1_000_000_000
"""Seeds that RIPT practises from, and how many there are: all fit into 31 bits, which every simulator takes."""

MEASURED = FIRST_SEED // SEEDS_APART
"""What the seed of an evaluation has to be below, or its episodes would begin where RIPT practises."""
