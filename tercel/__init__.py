"""Tercel: an inference engine for the Kimi K3 model family."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tercel.config import SamplingParams
    from tercel.runtime.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports what is asked for, so that the package itself is cheap to import."""
    if name == "LLM":
        from tercel.runtime.llm import LLM

        return LLM
    if name == "SamplingParams":
        from tercel.config import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
