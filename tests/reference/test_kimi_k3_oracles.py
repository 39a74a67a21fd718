"""The reference against logits that mlx-lm and transformers computed (tools/oracle_vectors.py)."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from tercel.reference import kimi_k3
from tercel.reference.kimi_k3 import KimiDeltaAttention
from tests.reference.vectors import ROOT, TOLERANCE, Vector, read


@pytest.fixture(scope="module")
def k3() -> Vector:
    return read("kimi_k3")


@pytest.mark.parametrize("name", TOLERANCE)
def test_logits_equal_the_oracles(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    vector = read(name)
    logits = vector.run()
    record_property("relative_error", vector.error(logits))
    assert vector.error(logits) <= TOLERANCE[name]
    assert torch.equal(logits.argmax(-1), vector.logits.argmax(-1))


@pytest.mark.parametrize("name", TOLERANCE)
def test_vectors_come_from_the_script_as_it_is(name: str) -> None:
    path = ROOT / "tests/vectors" / name / "expected.safetensors"
    with safe_open(path, "pt") as file:
        recorded = file.metadata()["script_sha256"]
    script = (ROOT / "tools/oracle_vectors.py").read_bytes()
    assert recorded == hashlib.sha256(script).hexdigest(), "re-create the vectors"


@pytest.mark.parametrize("name", TOLERANCE)
@pytest.mark.parametrize("change", [{"latent_norm_eps": 1e-5}, {"rms_norm_eps": 1e-2}], ids=str)
def test_another_eps_is_seen(name: str, change: dict[str, float]) -> None:
    vector = read(name)
    assert vector.error(vector.run(replace(vector.config, **change))) > 10 * TOLERANCE[name]


@pytest.mark.parametrize(
    "change", [{"moe_renormalize": False}, {"routed_scaling_factor": 1.0}], ids=str
)
def test_another_routing_weight_is_seen(change: dict[str, object]) -> None:
    # Not in K3: there a norm follows the sum over experts, so a common factor changes nothing.
    vector = read("kimi_linear")
    error = vector.error(vector.run(replace(vector.config, **change)))
    assert error > 10 * TOLERANCE["kimi_linear"]


@pytest.mark.parametrize(
    "change",
    [
        {"activation_situ_beta": 1.0},
        {"activation_situ_linear_beta": None},
        {"gate_lower_bound": -4.0},
        {"gate_lower_bound": None},
        {"hidden_act": "silu"},
        {"attn_res_block_size": 4},
    ],
    ids=str,
)
def test_another_k3_setting_is_seen(k3: Vector, change: dict[str, object]) -> None:
    assert k3.error(k3.run(replace(k3.config, **change))) > 10 * TOLERANCE["kimi_k3"]


def a_log_per_channel(self: KimiDeltaAttention, x: Tensor) -> Tensor:
    padded = F.pad(self.A_log, (0, self.c.kda_head_dim - len(self.A_log)))
    f = self.heads(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias)
    return -5.0 * torch.sigmoid(padded.exp() * f)


def decay_as_clamp(self: KimiDeltaAttention, x: Tensor) -> Tensor:
    f = self.heads(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias)
    return (-self.A_log.exp()[:, None] * F.softplus(f)).clamp(min=-5.0)


@pytest.mark.parametrize("wrong", [a_log_per_channel, decay_as_clamp])
def test_a_wrong_decay_is_seen(
    k3: Vector, wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KimiDeltaAttention, "log_decay", wrong)
    assert k3.error(k3.run()) > 10 * TOLERANCE["kimi_k3"]


@pytest.mark.parametrize("shift", [1, 2])
def test_snapshots_one_layer_off_are_seen(
    k3: Vector, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(self: kimi_k3.Layer, c: kimi_k3.Config, index: int, *functions: object) -> None:
        original(self, c, index, *functions)
        self.starts_block = (index - shift) % c.attn_res_block_size == 0

    original = kimi_k3.Layer.__init__
    monkeypatch.setattr(kimi_k3.Layer, "__init__", shifted)
    assert k3.error(k3.run()) > 10 * TOLERANCE["kimi_k3"]


def test_a_mixture_of_normalised_sources_is_seen(
    k3: Vector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def normalised(
        owner: torch.nn.Module, site: str, snapshots: list[Tensor], prefix: Tensor
    ) -> Tensor:
        unit = [kimi_k3.normalize(s, 1e-5) for s in snapshots]
        return original(owner, site, unit, kimi_k3.normalize(prefix, 1e-5) if unit else prefix)

    original = kimi_k3.attention_residual
    monkeypatch.setattr(kimi_k3, "attention_residual", normalised)
    assert k3.error(k3.run()) > 10 * TOLERANCE["kimi_k3"]


def swap_nibbles(name: str, tensor: Tensor) -> Tensor:
    return (tensor << 4) | (tensor >> 4) if name.endswith("weight_packed") else tensor


def scale_bias_127_off_by_one(name: str, tensor: Tensor) -> Tensor:
    # In w2, whose outputs a norm rescales, a common factor would be invisible.
    return tensor + 1 if name.endswith("w1.weight_scale") else tensor


def reverse_convolutions(name: str, tensor: Tensor) -> Tensor:
    return tensor.flip(-1) if name.endswith("conv1d.weight") else tensor


def no_selection_bias(name: str, tensor: Tensor) -> Tensor:
    return 0 * tensor if name.endswith("e_score_correction_bias") else tensor


def no_output_gate(name: str, tensor: Tensor) -> Tensor:
    return 0 * tensor if name.endswith("g_proj.weight") else tensor


@pytest.mark.parametrize(
    "wrong",
    [
        swap_nibbles,
        scale_bias_127_off_by_one,
        reverse_convolutions,
        no_selection_bias,
        no_output_gate,
    ],
)
def test_wrong_tensors_are_seen(k3: Vector, wrong: Callable[[str, Tensor], Tensor]) -> None:
    tensors = {name: wrong(name, tensor) for name, tensor in k3.tensors.items()}
    assert k3.error(k3.run(tensors=tensors)) > 10 * TOLERANCE["kimi_k3"]


def test_gate_and_up_swapped_is_seen(k3: Vector) -> None:
    swap = {"w1": "w3", "w3": "w1"}
    tensors = {}
    for name, tensor in k3.tensors.items():
        parts = [swap.get(part, part) for part in name.split(".")]
        tensors[".".join(parts)] = tensor
    assert k3.error(k3.run(tensors=tensors)) > 10 * TOLERANCE["kimi_k3"]
