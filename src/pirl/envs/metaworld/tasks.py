"""The fifty tasks of Meta-World: their names, as the package has them, and what to say to a policy."""

from pirl.errors import ConfigError, did_you_mean

PROMPTS: dict[str, str] = {
    "assembly-v3": "pick up the ring by its handle and put it over the peg",
    "basketball-v3": "put the ball into the basket",
    "bin-picking-v3": "move the cube from one bin into the other",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button from above",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "reach around the wall and press the button",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine to the goal",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "lift the ring off the peg",
    "door-close-v3": "close the door of the cabinet",
    "door-lock-v3": "lock the door by turning its latch",
    "door-open-v3": "open the door of the cabinet",
    "door-unlock-v3": "unlock the door by turning its latch back",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-close-v3": "turn the faucet off",
    "faucet-open-v3": "turn the faucet on",
    "hammer-v3": "pick up the hammer and drive in the nail",
    "hand-insert-v3": "put the hand into the hole at the goal",
    "handle-press-side-v3": "push the handle down, from the side",
    "handle-press-v3": "push the handle down",
    "handle-pull-side-v3": "pull the handle up, from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "lift the lever",
    "peg-insert-side-v3": "pick up the peg and insert it into the hole in the side of the box",
    "peg-unplug-side-v3": "pull the peg out of the side of the box",
    "pick-out-of-hole-v3": "take the puck out of the hole and bring it to the goal",
    "pick-place-v3": "pick up the puck and hold it at the goal",
    "pick-place-wall-v3": "lift the puck over the wall and hold it at the goal",
    "plate-slide-back-side-v3": "slide the plate out of the cabinet, sideways",
    "plate-slide-back-v3": "slide the plate out of the cabinet, towards the robot",
    "plate-slide-side-v3": "slide the plate sideways into the cabinet",
    "plate-slide-v3": "slide the plate into the cabinet",
    "push-back-v3": "pull the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-v3": "move the hand to the goal",
    "reach-wall-v3": "move the hand over the wall to the goal",
    "shelf-place-v3": "put the block on the shelf",
    "soccer-v3": "push the ball into the net",
    "stick-pull-v3": "pick up the stick and pull the thermos with it to the goal",
    "stick-push-v3": "pick up the stick and push the thermos with it to the goal",
    "sweep-into-v3": "sweep the cube into the hole",
    "sweep-v3": "sweep the cube off the table",
    "window-close-v3": "slide the window shut",
    "window-open-v3": "slide the window open",
}

# Names for more than one task. The ten of MT10 are those the benchmark calls so.
GROUPS: dict[str, tuple[str, ...]] = {
    "all": tuple(PROMPTS),
    "mt10": (
        "reach-v3",
        "push-v3",
        "pick-place-v3",
        "door-open-v3",
        "drawer-open-v3",
        "drawer-close-v3",
        "button-press-topdown-v3",
        "peg-insert-side-v3",
        "window-open-v3",
        "window-close-v3",
    ),
}


def choose_tasks(text: str) -> tuple[str, ...]:
    """The tasks a person asks for: names or groups, with commas between them; "reach" means "reach-v3"."""
    chosen: dict[str, None] = {}
    for name in filter(None, (part.strip().lower() for part in text.split(","))):
        full = name if name in PROMPTS else f"{name}-v3"
        if name not in GROUPS and full not in PROMPTS:
            hint = did_you_mean(name, [*PROMPTS, *GROUPS]) or f"It has {', '.join(PROMPTS)}. "
            raise ConfigError(f"Meta-World has no task {name!r}. {hint}mt10 and all name several.")
        chosen |= dict.fromkeys(GROUPS.get(name, (full,)))
    if not chosen:
        raise ConfigError(f"tasks = {text!r} names no task; try reach-v3, or mt10, or all.")
    return tuple(chosen)
