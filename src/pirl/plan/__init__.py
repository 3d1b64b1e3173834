"""`pirl plan`: what a training run will need on machines that are not here, from compiling its real update for them."""
