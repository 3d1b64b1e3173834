"""ALOHA in simulation: two arms hand over a cube or plug a peg into a socket (gym-aloha, on MuJoCo)."""
