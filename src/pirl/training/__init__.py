"""How it runs: so far, how parameters are laid out over devices."""
