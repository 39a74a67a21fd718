"""From what was heard of failing ranks to the one error that says what happened."""

import signal
from collections.abc import Mapping, Sequence

import msgspec

from tercel.errors import EngineError, ExchangeError
from tercel.runtime.messages import Failure
from tercel.runtime.rank_agreement import name_ranks


def explain(
    phase: str,
    *,
    failures: Mapping[int, Failure],
    deaths: Mapping[int, str],
    late: Sequence[int],
    silent: Sequence[int],
) -> Exception:
    """The first cause: a death, then an error of a rank's own, then who kept the others waiting.

    Args:
        failures: what ranks said before they ended.
        deaths: how other ranks ended, without a word.
        late: ranks that the engine waited for in vain.
        silent: ranks of which nothing of this was heard.
    """
    if deaths:
        told = "; ".join(f"rank {rank} ended ({how})" for rank, how in sorted(deaths.items()))
        return EngineError(f"{told} {phase}; the group is stopped, start it again")
    own = {rank: f for rank, f in failures.items() if f.kind != ExchangeError.__name__}
    if own:
        first = own[min(own)]
        alike = [rank for rank, failure in own.items() if failure.message == first.message]
        message = f"{name_ranks(alike)}: {first.message}"
        return msgspec.structs.replace(first, message=message).error()
    waited = sorted(failures)
    if late := late or silent:
        others = f" while {name_ranks(waited)} waited" if waited else ""
        return EngineError(
            f"{name_ranks(late)} made no progress in time {phase}{others}; the group is stopped: "
            "look at what keeps them, or raise rank_deadline_s"
        )
    return EngineError(f"{name_ranks(waited)}: {failures[waited[0]].message}")


def cause(exit_code: int) -> str:
    """Of a process's end."""
    return f"exit code {exit_code}" if exit_code >= 0 else signal.Signals(-exit_code).name
