"""How a run trains: the loop, its streams, measurements and checkpoints, and the layout over devices and hosts."""
