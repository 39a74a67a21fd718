"""Parallel layouts: how one model is spread over ranks, and the names they go by."""

import re
from dataclasses import dataclass
from enum import StrEnum

from tercel.core.model import ModelConfig
from tercel.errors import ConfigError

_NAME = re.compile(
    r"(?P<kind>tp|helix|dep)(?P<ranks>\d+)(?:_moetp(?P<moe_tp>\d+)ep(?P<moe_ep>\d+))?"
    r"(?:_pp(?P<pp>\d+))?(?:_dwdp(?P<distributed_weights>\d+))?"
)

_LARGEST_TP = 16
"""Ranks of the largest layout that an error suggests."""


class Axis(StrEnum):
    """What a layout divides. Parts are equal, contiguous and in rank order."""

    HEADS = "heads"
    VOCAB = "vocabulary"
    WIDTH = "width of a dense or shared MLP"
    LATENT = "latent columns of the up projection"
    EXPERTS = "experts"
    EXPERT_WIDTH = "width of a routed expert"
    TAPS = "features of the taps that a drafter reads"


@dataclass(frozen=True)
class Layout:
    """Ranks are numbered pipeline stage first, then tensor rank: rank = stage * tp + tp_rank."""

    tp: int = 1
    """Ranks that share every attention layer, dense MLP, embedding and head."""
    moe_tp: int | None = None
    """Ranks that share one expert's width. None: unset, which is not the same as 1 or `tp`."""
    moe_ep: int | None = None
    """Groups that the experts are dealt to. None: unset."""
    pp: int = 1
    """Pipeline stages."""
    attention_dp: int = 1
    """Attention replicas with requests of their own."""
    decode_cp: int = 1
    """Ranks that share one request's latent cache."""
    distributed_weights: int = 1
    """Context servers that hold one copy of the experts between them."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @property
    def reporting_rank(self) -> int:
        """The rank whose drawn tokens count: the first that has the head."""
        return self.tp * (self.pp - 1)

    @property
    def split_set(self) -> bool:
        """Whether the user named the expert split; routing must know the difference."""
        return self.moe_tp is not None or self.moe_ep is not None

    @property
    def expert_split(self) -> tuple[int, int]:
        """(moe_tp, moe_ep) in force: unset sides follow from the other, both unset mean all TP."""
        if self.moe_tp is None and self.moe_ep is None:
            return self.tp, 1
        if self.moe_tp is None:
            return self.tp // (self.moe_ep or 1), self.moe_ep or 1
        return self.moe_tp, self.moe_ep or self.tp // self.moe_tp

    def part(self, axis: Axis, rank: int) -> tuple[int, int]:
        """(index, count): `rank` holds part `index` of the `count` equal parts of `axis`.

        Neighbouring ranks hold different experts; ranks moe_ep apart share experts by width.
        """
        tp_rank = rank % self.tp
        moe_tp, moe_ep = self.expert_split
        if axis is Axis.EXPERTS:
            return tp_rank % moe_ep, moe_ep
        if axis is Axis.EXPERT_WIDTH:
            return tp_rank // moe_ep, moe_tp
        return tp_rank, self.tp

    def local_range(self, axis: Axis, rank: int, size: int) -> range:
        """The indices of `rank` among the `size` of `axis`, e.g. its experts."""
        index, count = self.part(axis, rank)
        return range(index * size // count, (index + 1) * size // count)

    def stage_layers(self, rank: int, num_layers: int) -> range:
        """The layers of the pipeline stage of `rank`; earlier stages hold the odd ones."""
        stage, (each, odd) = rank // self.tp, divmod(num_layers, self.pp)
        start = stage * each + min(stage, odd)
        return range(start, start + each + (stage < odd))

    @property
    def name(self) -> str:
        """The canonical name: `tp16_moetp4ep4`, `tp8_pp2`, `helix8` where ranks share a request's
        cache, `dep16` where each has requests of its own, `tp1_dwdp16` where servers share the
        experts."""
        kind = "dep" if self.attention_dp > 1 else "helix" if self.decode_cp > 1 else "tp"
        name = f"{kind}{self.tp}"
        if self.split_set and kind != "dep":
            name += "_moetp{}ep{}".format(*self.expert_split)
        if self.pp > 1:
            name += f"_pp{self.pp}"
        return name + (f"_dwdp{self.distributed_weights}" if self.distributed_weights > 1 else "")

    @classmethod
    def parse(cls, name: str) -> "Layout":
        """The layout called `name`; raises ConfigError for anything else."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"layout: {name!r} is not a layout name; write tpN, tpN_moetpMepE, tpN_ppS, "
                "helixN, depN or tp1_dwdpN"
            )
        groups = match.groupdict()
        kind, ranks = groups.pop("kind"), int(groups.pop("ranks"))
        sizes = {key: int(value) for key, value in groups.items() if value}
        if kind == "dep":
            sizes = {"attention_dp": ranks, "moe_tp": 1, "moe_ep": ranks} | sizes
        elif kind == "helix":
            sizes["decode_cp"] = ranks
        return cls(tp=ranks, **sizes)

    def check(self, model: ModelConfig) -> None:
        """Raises ConfigError listing every size of `model` that this layout does not divide."""
        problems = [f"{field} must be at least 1, got {value}" for field, value in self._sizes()]
        if not problems:
            problems = self._unbuilt()
        if not problems and (problems := self._indivisible(model)):
            sizes = [n for n in range(1, _LARGEST_TP + 1) if not Layout(n)._indivisible(model)]
            problems.append(f"layouts that fit: {', '.join(f'tp{size}' for size in sizes)}")
        if problems:
            raise ConfigError(f"layout {self.name}: " + "; ".join(problems))

    def check_sums(self, sums: "Layout") -> None:
        """Raises ConfigError unless each rank holds exactly what some ranks of `sums` hold, so that
        it can add up as they do."""
        whole = self.tp and sums.tp % self.tp == 0 and sums.pp == 1
        if not whole or not all(
            self._holds(axis, rank, sums, part)
            for axis in (Axis.EXPERTS, Axis.EXPERT_WIDTH)
            for rank in range(self.tp)
            for part in self.sum_ranks(rank, sums)
        ):
            raise ConfigError(
                f"sum_layout={sums.name}: its ranks do not divide those of layout {self.name}; "
                "choose one whose tp and expert split are multiples, without pipeline stages"
            )

    def sum_ranks(self, rank: int, sums: "Layout") -> range:
        """The ranks of `sums` that together hold what `rank` holds of a layer."""
        count, tp_rank = sums.tp // self.tp, rank % self.tp
        return range(tp_rank * count, (tp_rank + 1) * count)

    def _holds(self, axis: Axis, rank: int, other: "Layout", other_rank: int) -> bool:
        """Whether `rank` has all that `other_rank` of another layout has of an axis."""
        (index, count), (its_index, its_count) = (
            self.part(axis, rank),
            other.part(axis, other_rank),
        )
        return its_count % count == 0 and its_index * count // its_count == index

    def _sizes(self) -> list[tuple[str, int]]:
        sizes = {
            "tp": self.tp,
            "pp": self.pp,
            "moe_tp": self.expert_split[0] if self.tp > 0 else 1,
            "moe_ep": self.expert_split[1] if self.tp > 0 else 1,
        }
        return [(field, value) for field, value in sizes.items() if value < 1]

    def _unbuilt(self) -> list[str]:
        unbuilt = {"attention_dp": "depN", "decode_cp": "helixN", "distributed_weights": "_dwdpN"}
        return [
            f"{name} ({field}={getattr(self, field)}) is not built; choose tpN, tpN_moetpMepE or "
            "tpN_ppS"
            for field, name in unbuilt.items()
            if getattr(self, field) != 1
        ]

    def _indivisible(self, model: ModelConfig) -> list[str]:
        moe_tp, moe_ep = self.expert_split
        problems = []
        if moe_tp * moe_ep != self.tp:
            problems.append(f"moe_tp {moe_tp} x moe_ep {moe_ep} must be tp {self.tp}")
        divisions = [
            ("num_attention_heads", model.num_attention_heads, self.tp, "tp"),
            ("linear_attn_config.num_heads", model.kda_num_heads, self.tp, "tp"),
            ("vocab_size", model.vocab_size, self.tp, "tp"),
            ("intermediate_size", model.intermediate_size, self.tp, "tp"),
            ("num_experts", model.num_experts, moe_ep, "moe_ep"),
            ("routed_expert_hidden_size", model.routed_expert_hidden_size or 0, self.tp, "tp"),
            ("shared expert width", model.shared_intermediate_size, self.tp, "tp"),
            ("moe_intermediate_size", model.moe_intermediate_size, moe_tp, "moe_tp"),
        ]
        for field, size, parts, axis in divisions:
            if size % parts:
                problems.append(f"{field} {size} does not divide by {axis} {parts}")
        if self.pp > model.num_hidden_layers:
            problems.append(f"pp {self.pp} exceeds num_hidden_layers {model.num_hidden_layers}")
        return problems
