"""Every exception that a user of Tercel can meet.

Each message names the field, the value and the fix.
"""


class TercelError(Exception):
    """Base of everything that Tercel raises on purpose."""


class ConfigError(TercelError, ValueError):
    """A configuration that cannot be run."""


class CheckpointError(TercelError):
    """A checkpoint that is missing, damaged or not understood."""


class RequestError(TercelError, ValueError):
    """A request that cannot be served; the server answers HTTP 400."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ContractError(TercelError, ValueError):
    """A call outside an op's contract; raised before any launch."""


class EngineError(TercelError, RuntimeError):
    """The engine cannot go on with a request or at all."""
