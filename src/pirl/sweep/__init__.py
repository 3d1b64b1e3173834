"""A small sweep: a few knobs, many short trials, and the best of them trained for longer."""
