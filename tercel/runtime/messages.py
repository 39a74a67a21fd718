"""What the engine core and its client say to each other: msgspec structs over one ZeroMQ socket."""

import msgspec

import tercel.errors
from tercel.config import EngineConfig, SamplingParams
from tercel.errors import EngineError, RequestError, TercelError
from tercel.runtime.metrics import Stats
from tercel.runtime.outputs import RequestOutput
from tercel.runtime.sequence import Limits


class Message(msgspec.Struct, tag=True):
    """Every message names its class on the wire."""


class Start(Message):
    """The first line of the core's standard input, as JSON."""

    endpoint: str
    config: EngineConfig
    open_model: str
    """module:function of an OpenModel."""


class Submit(Message):
    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams


class Abort(Message):
    request_id: str


class AskStats(Message):
    pass


class Shutdown(Message):
    """Finish what runs, refuse what comes, and end."""

    drain_s: float
    """After this long, what still runs is aborted."""


class Loading(Message):
    """Progress of the weights."""

    done_bytes: int
    total_bytes: int
    waiting: str = ""
    """Ranks that the others wait for."""


class Ready(Message):
    limits: Limits


class Outputs(Message):
    """Of one step."""

    outputs: list[RequestOutput]


class Failure(msgspec.Struct):
    """An exception that crosses the process boundary."""

    kind: str
    message: str
    field: str | None = None
    """The field of a RequestError."""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        if isinstance(error, RequestError):
            message = str(error).removeprefix(f"{error.field}: ")
            return cls(type(error).__name__, message, error.field)
        return cls(type(error).__name__, str(error))

    def error(self) -> Exception:
        """The exception again. A class unknown here becomes an EngineError that names it."""
        if self.field is not None:
            return RequestError(self.field, self.message)
        kind = getattr(tercel.errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, TercelError):
            return kind(self.message)
        return EngineError(f"{self.kind}: {self.message}")


class Refused(Message):
    """One request was not admitted."""

    request_id: str
    failure: Failure


class StatsReply(Message):
    stats: Stats


class Failed(Message):
    """The core could not start or cannot go on; it ends after this."""

    failure: Failure


ToCore = Submit | Abort | AskStats | Shutdown
FromCore = Loading | Ready | Outputs | Refused | StatsReply | Failed
