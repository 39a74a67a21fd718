"""What an engine and its ranks say to each other: msgspec structs over one ZeroMQ socket."""

import msgspec

from tercel.config import EngineConfig
from tercel.core.member import Member
from tercel.core.sampling import StepResult
from tercel.core.step import StepPlan
from tercel.runtime.messages import Failure, Message

ADDRESS = "engine"
"""Key in the ranks' store of the engine's Address as JSON."""


class Address(msgspec.Struct):
    """Where the engine listens to its ranks."""

    endpoint: str
    token: str
    """What a rank has to know to be heard."""


class StartRank(Message):
    """The first line of a rank's standard input, as JSON."""

    member: Member
    config: EngineConfig
    address: Address


class Hello(Message):
    """The first word of a rank."""

    rank: int
    token: str
    host: str
    pid: int


class Report(Message):
    """The rank has read its configuration and resolved its program; no weights yet."""

    values: dict[str, str]
    """What must be equal on all ranks, by name."""


class Load(Message):
    """All ranks agree: read the weights."""


class LoadedSome(Message):
    """Progress of one rank's weights."""

    done_bytes: int
    total_bytes: int


class Loaded(Message):
    pass


class Join(Message):
    """All ranks have their weights: form the group and create the caches, which is collective."""


class Joined(Message):
    pass


class Run(Message):
    step: int
    plan: StepPlan


class Done(Message):
    """From the rank that reports; the others say nothing while all is well."""

    step: int
    result: StepResult


class AskCalls(Message):
    pass


class Calls(Message):
    counts: dict[str, int]


class Failed(Message):
    """The rank cannot go on; it ends after this."""

    failure: Failure


class Close(Message):
    pass


class Ping(Message):
    """Says nothing; that it can be sent shows that the rank is there."""


ToRank = Load | Join | Run | AskCalls | Close | Ping
FromRank = Hello | Report | LoadedSome | Loaded | Joined | Done | Calls | Failed
