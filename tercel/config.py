"""What a user may choose: one engine configuration, and sampling parameters per request."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from tercel.errors import ConfigError, RequestError

Mode = Literal["off", "auto", "require"]
Acceptance = Literal["match", "token", "block"]
T = TypeVar("T")

_LARGEST = 2**31 - 1
"""Of integers without a limit of their own: they travel to other processes and to devices."""
_LONGEST_S = 86400
MAX_DRAFTS = 63
"""Guesses of one request and step."""
MAX_STOPS = 64
"""Stop strings of one request: each is looked for after every token."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from; recorded in the run manifest."""

    model: str = ""
    """Checkpoint directory."""
    mode: Mode = "auto"
    """off: portable implementations only; auto: the best admissible; require: a named target."""
    layout: str = "tp1"
    """Parallel layout by name, e.g. tp16_moetp4ep4."""
    sum_layout: str | None = None
    """Layout whose sums this one reproduces to the bit, by plain implementations (mode off); None:
    its own sums."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Activation dtype; auto is float32 on a CPU and bfloat16 on a GPU."""
    load_format: Literal["checkpoint", "dummy"] = "checkpoint"
    """dummy: random weights of the configured shapes, for measuring."""
    page_size: int = 64
    """Tokens per cache page."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None: the smaller of the model's limit and the pool."""
    max_running: int = 16
    """Requests decoded together, which is also the number of KDA slots."""
    max_step_tokens: int = 1024
    """Tokens per step; longer prompts are prefilled in chunks."""
    cache_tokens: int = 65536
    """Token positions that the paged caches hold over all requests."""
    seed: int | None = None
    """Seed that requests without one draw theirs from; None: from the operating system."""
    num_threads: int | None = None
    """CPU threads of the compute library; None: one per 64 MiB of weights, at most one per core."""
    rank_deadline_s: float = 120.0
    """Seconds within which every rank shows progress while it starts, loads or runs a step."""
    decode_graphs: bool = True
    """Whether decode steps, drafts included, run as CUDA graphs, on a GPU and with one rank; else
    op by op."""
    drafter: str | None = None
    """Directory of a drafter checkpoint, or `suffix` for guesses from the request's own text; None:
    a token per request and step."""
    max_drafts: int | None = None
    """Guesses per request and step at most; None: as many as the drafter was trained for."""
    verify_tokens: int = 64
    """Tokens of a step over all requests that verify guesses: more requests verify fewer each."""
    acceptance: Acceptance = "match"
    """Which guesses are kept. match: those that plain decoding draws, so that seeds give its text;
    token and block: more of them, by other draws of the same law."""
    min_confidence: float = 0.0
    """Chance of acceptance, by the drafter's estimate, below which a guess is not verified."""
    adaptive_drafts: bool = True
    """Whether a request whose guesses are not accepted stops drafting for a while."""
    forced_acceptance: float | None = None
    """For benchmarks: mean guesses accepted per step, whatever they are. The text is not the
    model's, which every output says."""
    kv_dtype: Literal["auto", "float8", "nvfp4"] = "auto"
    """Of cached latents. auto: the activation dtype; float8: e4m3, half of bf16's bytes, and lossy;
    nvfp4 is not built."""
    disaggregation: str | None = None
    """Role of this server in a context / generation pair; not built."""
    profile: str | None = None
    """Deployment profile file; not built."""
    prefix_caching: bool = False
    """Reuse of shared prefixes; not built."""

    def __post_init__(self) -> None:
        _check_choices(self)
        unbuilt = {
            "kv_dtype": ("auto", "float8"),
            "disaggregation": (None,),
            "profile": (None,),
            "prefix_caching": (False,),
        }
        for name, built in unbuilt.items():
            if getattr(self, name) not in built:
                use = " or ".join(map(repr, built))
                raise ConfigError(f"{name}={getattr(self, name)!r} is not built; use {use}")
        for name in ("page_size", "max_running", "max_step_tokens", "cache_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.rank_deadline_s <= _LONGEST_S:
            raise ConfigError(
                f"rank_deadline_s={self.rank_deadline_s} must be positive and at most {_LONGEST_S}"
            )
        _check_speculation(self)
        for name in ("max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
        if self.cache_tokens % self.page_size:
            raise ConfigError(
                f"cache_tokens={self.cache_tokens} must be a multiple of page_size={self.page_size}"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EngineConfig":
        """From keyword values; unknown names raise ConfigError with the nearest known one."""
        return _from_dict(cls, values, lambda name, text: ConfigError(f"{name}: {text}"))


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are drawn. Defaults: temperature 1, the whole distribution."""

    max_tokens: int = 1024
    """Tokens to generate at most."""
    min_tokens: int = 0
    """Tokens before which no stop token or stop string ends the request."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens seen in the output."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of single tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the request; they are not part of its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request besides the model's own."""
    ignore_eos: bool = False
    """Whether the model's own stop tokens are ordinary ones."""
    logprobs: int | None = None
    """Log-probabilities per token: of the sampled token and of this many best ones."""
    seed: int | None = None
    """Randomness of this request; None: drawn at admission."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise RequestError("stop", f"write ({self.stop!r},): each string of a tuple is a stop")
        _check_types(self)
        limits: tuple[tuple[str, float, float], ...] = (
            ("max_tokens", 1, _LARGEST),
            ("min_tokens", 0, self.max_tokens),
            ("temperature", 0, 100),
            ("top_k", 0, _LARGEST),
            ("top_p", 1e-9, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 1e-9, 100),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if not low <= value <= high:
                raise RequestError(name, f"{value} is outside {low:g} .. {high:g}")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise RequestError("logprobs", f"{self.logprobs} is outside 0 .. 20")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise RequestError("seed", f"{self.seed} is outside 0 .. 2**63 - 1")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise RequestError("logit_bias", f"{bias} for token {token} is outside -100 .. 100")
        if len(self.stop) > MAX_STOPS:
            raise RequestError("stop", f"{len(self.stop)} strings are more than {MAX_STOPS}")
        if any(not text for text in self.stop):
            raise RequestError("stop", "an empty string would stop every request; remove it")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """From keyword values; unknown names raise RequestError."""
        return _from_dict(cls, values, RequestError)


def _from_dict(cls: type[T], values: Mapping[str, Any], error: Any) -> T:
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise error(name, f"unknown; the fields are {', '.join(known)}")
    return cls(**values)


def _check_speculation(config: EngineConfig) -> None:
    for name in ("acceptance", "max_drafts", "min_confidence", "forced_acceptance"):
        value = getattr(config, name)
        if config.drafter is None and value != EngineConfig.__dataclass_fields__[name].default:
            raise ConfigError(f"{name}={value!r}: nothing is guessed; set drafter, or leave it out")
    if config.max_drafts is not None and not 1 <= config.max_drafts <= MAX_DRAFTS:
        raise ConfigError(f"max_drafts={config.max_drafts} is outside 1 .. {MAX_DRAFTS}")
    if config.verify_tokens < 2:
        raise ConfigError(f"verify_tokens={config.verify_tokens} must be at least 2")
    if not 0 <= config.min_confidence <= 1:
        raise ConfigError(f"min_confidence={config.min_confidence} is outside 0 .. 1")
    forced = config.forced_acceptance
    if forced is not None and not 0 <= forced <= MAX_DRAFTS:
        raise ConfigError(f"forced_acceptance={forced} is outside 0 .. {MAX_DRAFTS}")


def _check_choices(config: EngineConfig) -> None:
    choices = {
        "mode": ("off", "auto", "require"),
        "dtype": ("auto", "float32", "bfloat16"),
        "load_format": ("checkpoint", "dummy"),
        "acceptance": ("match", "token", "block"),
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ConfigError(
                f"{name}={getattr(config, name)!r}; choose one of {', '.join(allowed)}"
            )


def _check_types(params: SamplingParams) -> None:
    """Raises RequestError where a value is not of the type that its field declares."""
    for item in fields(params):
        value, declared = getattr(params, item.name), item.type
        if not _is_a(value, declared):
            name = declared.__name__ if isinstance(declared, type) else declared
            raise RequestError(item.name, f"{value!r} is not of type {name}")


def _is_a(value: object, declared: Any) -> bool:
    """Whether a value has a declared type. An integer is a number, True is none, and a list will
    do for a tuple."""
    kind, inner = get_origin(declared) or declared, get_args(declared)
    if kind is UnionType:
        return any(_is_a(value, each) for each in inner)
    if kind is tuple:
        return isinstance(value, tuple | list) and all(_is_a(each, inner[0]) for each in value)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(
            _is_a(key, inner[0]) and _is_a(each, inner[1]) for key, each in value.items()
        )
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if kind is float else kind)
