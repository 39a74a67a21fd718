"""Commands under torchrun, srun or mpirun: one process is the user's, the others are ranks."""

import typer

from tercel.config import EngineConfig
from tercel.core.layout import Layout
from tercel.parallel.launch import member_of


def serve_as_rank(config: EngineConfig) -> bool:
    """Where a launcher started this process as another rank than 0, runs that rank to its end and
    returns True: the command is then done. Rank 0 goes on and starts the engine.

    Raises:
        ConfigError: the launcher started more or fewer processes than the layout has ranks.
        typer.Exit: the rank failed.
    """
    member = member_of(Layout.parse(config.layout))
    if member is None or member.rank == 0:
        return False
    from tercel.runtime.rank_process import run_rank

    if code := run_rank(config, member):
        raise typer.Exit(code)
    return True
