"""Muon for matrices, AdamW for the rest.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
"""

from collections import defaultdict

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is made orthogonal, for parameters [..., out, in].

    Leading axes are independent matrices. Parameters of one shape are updated in one batch.
    """

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for param in params:
            by_shape[param.shape].append(param)
        super().__init__([{"params": group} for group in by_shape.values()], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params, decay = group["params"], 1 - group["lr"] * group["weight_decay"]
            grads = torch.stack([param.grad for param in params])
            state = self.state[params[0]]
            momentum = state.setdefault("momentum", torch.zeros_like(grads))
            momentum.lerp_(grads, 1 - group["momentum"])
            update = orthogonalize(grads.lerp(momentum, group["momentum"]))
            scale = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            for param, delta in zip(params, update, strict=True):
                param.mul_(decay).add_(delta, alpha=-group["lr"] * scale)


@torch.compile(dynamic=False)
def orthogonalize(matrix: Tensor) -> Tensor:
    """Newton-Schulz towards the nearest matrix with orthonormal rows or columns, in bf16."""
    x = matrix.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrix.dtype)


EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight", "gate.weight")
"""Endings of the matrices whose rows belong to tokens or experts."""


def build(
    model: nn.Module,
    *,
    matrix_lr: float,
    vector_lr: float,
    weight_decay: float,
    embeddings: tuple[str, ...] = EMBEDDINGS,
) -> list[torch.optim.Optimizer]:
    """Muon for the projections and experts; AdamW for `embeddings`, by their endings, and
    vectors."""
    matrices, others = [], []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        is_matrix = param.squeeze().ndim >= 2 and "conv1d" not in name
        is_embedding = name.endswith(embeddings)
        (matrices if is_matrix and not is_embedding else others).append(param)
    return [
        Muon(matrices, lr=matrix_lr, momentum=0.95, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=vector_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
    ]
