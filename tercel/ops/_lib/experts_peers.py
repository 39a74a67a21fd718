"""What the experts' kernels are timed beside, where it is installed."""

from typing import Any

import torch

from tercel.contract.timing import Work
from tercel.errors import ContractError

INDEXED = {"gemm_type": "indexed"}


def humming(
    z: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor | None,
    first_expert: int,
    **_: Any,
) -> Work:
    """Both products on MXFP4 weights and bf16 activations as it configures them; neither the
    activation between them nor the weighted sum. Sorting the slots is done here, once."""
    from humming.layer import HummingLayer

    if w13_scale is None or w2_scale is None or w13_scale.dtype != torch.uint8:
        raise ContractError("only the MXFP4 form is timed")
    chosen = ids - first_expert
    if bool(((chosen < 0) | (chosen >= len(w13))).any()):
        raise ContractError("slots that are elsewhere are not timed")
    layers = []
    for codes, scale in ((w13, w13_scale), (w2, w2_scale)):
        with z.device:
            layer = HummingLayer(
                shape_n=codes.shape[1],
                shape_k=2 * codes.shape[2],
                weight_config={"quant_method": "mxfp4"},
                num_experts=len(codes),
                torch_dtype=z.dtype,
            )
        layer.load_from_tensors({"weight": codes, "weight_scale": scale})
        layer.transform()
        layers.append(layer)
    slots = chosen.numel()
    hidden = z.new_empty(slots, layers[1].shape_k).normal_()
    gate_up = _product(layers[0], z, chosen)
    down = _product(layers[1], hidden, chosen.reshape(slots, 1))

    def run() -> tuple[object, object]:
        return gate_up(), down()

    return run


def _product(layer: Any, x: torch.Tensor, chosen: torch.Tensor) -> Work:
    """x [T, K] through the experts `chosen` [T, k] of a layer."""
    from humming.tune import get_heuristics_config

    tuning = get_heuristics_config(layer.humming_config, chosen.numel(), **INDEXED)
    order, experts = _blocks(chosen, tuning["block_shape"][0])
    padded = torch.tensor(order.numel(), dtype=torch.int32, device=x.device)
    return lambda: layer(
        x,
        sorted_ids=order,
        expert_ids=experts,
        num_tokens_padded=padded,
        top_k=chosen.shape[1],
        compute_config=INDEXED,
        tuning_config=tuning,
    )


def _blocks(chosen: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots by expert, each expert's padded to whole blocks with the number of slots, and the
    expert of each block."""
    slots: list[int] = []
    experts: list[int] = []
    flat = chosen.flatten().tolist()
    for expert in sorted(set(flat)):
        own = [slot for slot, each in enumerate(flat) if each == expert]
        own += [len(flat)] * (-len(own) % size)
        slots += own
        experts += [expert] * (len(own) // size)
    order = torch.tensor(slots, dtype=torch.int32, device=chosen.device)
    return order, torch.tensor(experts, dtype=torch.int32, device=chosen.device)
