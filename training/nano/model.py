"""The reference model with parts that train fast on a GPU: same parameters, same function.

Matrix products run in bf16 on fp32 master weights; norms, gates, routing, mixtures and the sum of
sublayers stay fp32. Expert weights pass through MXFP4 on their way to the product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercel.reference.kimi_k3 import Config, Function, Model, Router, ShortConvolution
from tercel.reference.weights import init_weights
from training.nano.mxfp4 import fake_quantize


class Bf16Linear(nn.Linear):
    """A projection whose operands are rounded to bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16())


class ShiftedConvolution(ShortConvolution):
    """The depthwise convolution as a sum of shifted products, which the compiler fuses."""

    def forward(self, x: Tensor) -> Tensor:
        width, length = self.weight.shape[-1], x.shape[1]
        history = F.pad(x.float(), (0, 0, width - 1, 0))
        taps = self.weight[:, 0].unbind(-1)
        y = sum(history[:, j : j + length] * tap for j, tap in enumerate(taps))
        return F.silu(y).to(x.dtype)


class CountingRouter(Router):
    """A router that counts how many rows each expert received since the last balancing."""

    load: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().forward(x)
        if self.training:
            experts = torch.arange(self.c.num_experts, device=ids.device)
            self.load.add_((ids[..., None] == experts).sum((0, 1)))
        return ids, weights

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Moves the selection bias of each expert against its excess load."""
        load = self.load.float()
        self.e_score_correction_bias += rate * torch.sign(load.mean() - load)
        self.e_score_correction_bias -= self.e_score_correction_bias.mean()
        self.load.zero_()


def dense_experts(
    z: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, act: Function
) -> Tensor:
    """Every expert on every row, weighted by zero where it was not chosen.

    With 16 small experts one wide product costs less than sorting rows by expert.
    """
    experts = w1.shape[0]
    w1, w3, w2 = (fake_quantize(w).bfloat16() for w in (w1, w3, w2))
    gate = F.linear(z, w1.flatten(0, 1)).unflatten(-1, (experts, -1))
    up = F.linear(z, w3.flatten(0, 1)).unflatten(-1, (experts, -1))
    chosen = torch.zeros(len(z), experts, device=z.device).scatter(-1, ids, weights.float())
    hidden = act(gate, up) * chosen[..., None].to(z.dtype)
    return F.linear(hidden.flatten(1), w2.transpose(0, 1).flatten(1))


def chunked_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`recurrent_kda` by flash-linear-attention's chunked kernel, on bf16 q, k and v."""
    from fla.ops.kda import chunk_kda

    q, k = q.to(v.dtype), k.to(v.dtype)
    # The gate is bounded below, which lets the kernel use matrix units on every sub-block.
    return chunk_kda(q, k, v, g, beta, scale=1.0, safe_gate=True, lower_bound=-5.0)[0]


def training_model(config: Config, seed: int, kda: Function) -> Model:
    """An initialised model in training form, fp32 parameters, on the CPU."""
    model = Model(config, kda=kda, experts=dense_experts)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, ShortConvolution):
            module.weight.data.uniform_(-0.5, 0.5, generator=generator)
            module.__class__ = ShiftedConvolution
        elif isinstance(module, Router):
            module.register_buffer("load", torch.zeros(config.num_experts), persistent=False)
            module.__class__ = CountingRouter
        elif isinstance(module, nn.Linear) and not name.endswith("res_proj"):
            module.__class__ = Bf16Linear
    return model
