"""Every user-facing exception. A message names the field, the value and the fix."""


class TercelError(Exception):
    """Base of everything that Tercel raises on purpose."""


class ConfigError(TercelError, ValueError):
    """A configuration that cannot run: unknown keys, uneven sizes, what is not built."""


class CheckpointError(TercelError):
    """A model directory that cannot be loaded; the message lists every problem found."""


class RequestError(TercelError, ValueError):
    """One request is wrong; the engine goes on. `field` names the offending request field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ContractError(TercelError, ValueError):
    """An op was called outside its contract; raised before anything is launched."""


class CheckFailed(TercelError, AssertionError):
    """A certification check found an op that does not keep its contract."""


class ReceiptError(TercelError):
    """A certification bundle that does not belong to this source; nothing of it is kept."""


class NoTarget(TercelError):
    """`require` found no admissible target; the message is the routing trace."""


class EngineError(TercelError, RuntimeError):
    """The engine cannot go on: it died, or it was asked for work after its shutdown."""


class ExchangeError(EngineError):
    """Other ranks did not take part in an exchange: one of them is late or gone."""
