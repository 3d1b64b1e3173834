"""What a prompt says about the quality of the actions that follow, so that a policy can be asked for good ones."""


def indicate(prompt: str, positive: bool) -> str:
    """The prompt, and whether what follows it was better or worse than usual."""
    task = prompt.strip().rstrip(".")
    return f"{task}{'. ' if task else ''}Advantage: {'positive' if positive else 'negative'}"
