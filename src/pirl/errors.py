"""The errors pirl raises about what it was given: each says what is wrong, where, and what to do about it."""


class UserError(ValueError):
    """Bad input: the command line prints its message without a traceback and exits with code 2."""


class ConfigError(UserError):
    """A configuration whose fields contradict each other."""


class ObservationError(UserError):
    """An observation, prompt or action that the model cannot take."""


class CheckpointError(UserError):
    """A checkpoint that is absent, damaged, or of another model."""


class DataError(UserError):
    """A dataset, or a file of it, that cannot be used as asked."""


class EnvError(UserError):
    """An environment that fails: it cannot be started, raises, or says what it should not."""
