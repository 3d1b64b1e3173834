"""pirl: reinforcement-learning post-training for π₀-family robot policies."""

__version__ = "0.1.0"
