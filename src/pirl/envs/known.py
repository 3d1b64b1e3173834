"""The environments of pirl's, by name; registered with Gymnasium without importing any of them."""

from dataclasses import dataclass

import gymnasium


@dataclass(frozen=True)
class KnownEnv:
    """Where an environment is. `extra` is what `pip install 'pirl[…]'` needs for it, if anything."""

    alias: str
    id: str
    entry_point: str
    extra: str | None
    # Of a native vector environment, if it has one.
    vector_entry_point: str | None = None


_TABLETOPS = "pirl.envs.tabletop.env:TabletopVectorEnv"
KNOWN = (
    KnownEnv("tabletop", "pirl/Tabletop-v0", "pirl.envs.tabletop.env:TabletopEnv", None, _TABLETOPS),
    KnownEnv("aloha", "pirl/Aloha-v0", "pirl.envs.aloha.env:AlohaEnv", "aloha"),
    KnownEnv("libero", "pirl/Libero-v0", "pirl.envs.libero.env:LiberoEnv", "libero"),
    KnownEnv("metaworld", "pirl/MetaWorld-v0", "pirl.envs.metaworld.env:MetaWorldEnv", "metaworld"),
)


def register_envs() -> None:
    """Make the ids known to Gymnasium; doing it twice does nothing."""
    for known in KNOWN:
        if known.id not in gymnasium.registry:
            gymnasium.register(known.id, known.entry_point, vector_entry_point=known.vector_entry_point)
