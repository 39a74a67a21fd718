"""Block boundaries: what a block returns is what a fused op would take over from there."""

from types import SimpleNamespace

import torch

from tercel.blocks import join
from tercel.blocks.kda import kda
from tercel.blocks.mla import mla
from tercel.blocks.mlp import moe
from tercel.core.inputs import build_inputs
from tercel.core.step import Row, StepClass, StepPlan
from tercel.parallel import SingleGroup, run_threads
from tercel.targets.load import meta_cache
from tests.targets.models import PAGE, program, resolved

DECODE = StepPlan(verify=(Row("a", (1,), 3, 1, (1,)), Row("b", (1,), 4, 2, (2,))))


def setting():
    """(site table, weights, meta-free inputs, place) of the tiny K3's decode step."""
    ours = program("kimi_k3")
    inputs = build_inputs(DECODE, page_size=PAGE, device=torch.device("cpu"))
    return ours._tables[StepClass.DECODE], ours.weights, inputs, ours.place


def real_cache():
    place = resolved("kimi_k3").place
    cache = meta_cache(place, PAGE, torch.float32)
    for layers in (cache.latent, cache.kda):
        for index, layer in layers.items():
            values = {
                name: torch.zeros_like(x, device="cpu")
                for name, x in vars(layer).items()
                if x is not None
            }
            layers[index] = type(layer)(**values)
    return cache


def test_attention_returns_the_gated_core_before_o_proj():
    k, w, inputs, place = setting()
    model = place.model
    without_o_proj = SimpleNamespace(**{**vars(k), "o_proj": None})
    cache, x = real_cache(), torch.randn(2, model.hidden_size)
    layer = model.mla_layers[0]
    core = mla(without_o_proj, w.layers[layer].attention, x, inputs, cache.latent[layer], model)
    assert core.shape == (2, model.num_attention_heads * model.v_head_dim)
    core = kda(without_o_proj, w.layers[0].attention, x, inputs, cache.kda[0], model)
    assert core.shape == (2, model.kda_size)


def test_moe_returns_unreduced_parts_before_norm_and_projections():
    k, w, _, place = setting()
    model = place.model
    names = ("latent_norm", "latent_up", "down")
    without_tail = SimpleNamespace(**{**vars(k), **dict.fromkeys(names)})
    x = torch.randn(2, model.hidden_size)
    (routed,), shared = moe(without_tail, w.layers[1].mlp, x, place)
    assert routed.shape == (2, model.latent_size)
    assert shared.shape == (2, model.shared_intermediate_size)


def test_a_fused_join_can_stand_in_for_the_block():
    """One function from (core, residual stream) to (normed, prefix, mixture), as a collective op
    that projects, reduces, adds, selects and normalises would be."""
    k, w, _, place = setting()
    model = place.model
    layer, bank = w.layers[1], torch.randn(model.num_snapshots, 2, model.hidden_size)
    core, prefix = torch.randn(2, model.kda_size), torch.randn(2, model.hidden_size)
    selection = join.before_mlp(layer, 1, model)

    def fused(core, o_proj, prefix, bank):
        updated = prefix + core @ o_proj.T
        sources = torch.cat([bank, updated[None]])
        scores = (
            torch.nn.functional.rms_norm(sources, sources.shape[-1:], eps=model.rms_norm_eps)
            @ (selection.res.norm * selection.res.proj)
        ).softmax(0)
        mixture = (scores[..., None] * sources).sum(0)
        normed = torch.nn.functional.rms_norm(
            mixture, mixture.shape[-1:], selection.norm, model.rms_norm_eps
        )
        return normed, updated, mixture

    o_proj = layer.attention.o_proj
    ours = join.join_attention(
        k, SingleGroup(), o_proj, core, (prefix, bank.clone()), selection, place
    )
    theirs = fused(core, o_proj, prefix, bank[: selection.num_snapshots])
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_a_join_before_a_snapshot_stores_the_prefix_and_starts_anew():
    k, w, _, place = setting()
    model = place.model
    last = model.attn_res_block_size - 1
    selection = join.after_layer(w, last, place)
    assert selection.stores == 1
    bank = torch.randn(model.num_snapshots, 2, model.hidden_size)
    prefix, act = torch.randn(2, model.hidden_size), torch.randn(2, model.intermediate_size)
    _, after, _ = join.join_mlp(
        k, SingleGroup(), w.layers[0].mlp, act, (prefix, bank), selection, place
    )
    assert after is None
    assert torch.allclose(bank[1], prefix + k.down(act, w.layers[0].mlp.down), atol=1e-5)


def test_joins_reduce_over_the_group():
    """Two ranks with half the columns each give what one rank gives with all of them."""
    k, w, _, place = setting()
    model = place.model
    layer = w.layers[1]
    core, prefix = torch.randn(2, model.kda_size), torch.randn(2, model.hidden_size)
    bank = torch.randn(model.num_snapshots, 2, model.hidden_size)
    selection = join.before_mlp(layer, 1, model)
    whole = join.join_attention(
        k, SingleGroup(), layer.attention.o_proj, core, (prefix, bank.clone()), selection, place
    )
    half = model.kda_size // 2

    def rank(group):
        mine = slice(group.rank * half, (group.rank + 1) * half)
        part = layer.attention.o_proj[:, mine].contiguous()
        stream = (prefix, bank.clone())
        return join.join_attention(k, group, part, core[:, mine], stream, selection, place)

    for result in run_threads(2, rank):
        for one, other in zip(result, whole, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
