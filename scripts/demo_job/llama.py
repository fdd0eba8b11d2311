"""A small Llama: RMS norms, rotary positions, grouped-query attention, SwiGLU. A stage of a pipeline has some of its
layers; the plan for tensor parallelism is that of torchtitan, without sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional


@dataclass(frozen=True)
class LlamaConfig:
    """`num_kv_heads`: each is shared by `num_heads // num_kv_heads` heads."""

    dim: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden: int = 256
    vocabulary: int = 256
    context: int = 48


class Attention(nn.Module):
    rotation: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.wq = nn.Linear(config.dim, config.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * self.head_dim, config.dim, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(config.context), frequencies)
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # Under tensor parallelism this rank has some of the heads.
        query, key, value = (
            projected.view(batch, length, -1, self.head_dim).transpose(1, 2)
            for projected in (self.wq(x), self.wk(x), self.wv(x))
        )
        attended = functional.scaled_dot_product_attention(
            self._rotated(query), self._rotated(key), value, is_causal=True, enable_gqa=True
        )
        mixed: Tensor = self.wo(attended.transpose(1, 2).reshape(batch, length, -1))
        return mixed

    def _rotated(self, heads: Tensor) -> Tensor:
        cos, sin = self.rotation[:, : heads.shape[2]]
        even, odd = heads[..., ::2], heads[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return result


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.attention, self.feed_forward = Attention(config), FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        mixed: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return mixed


class Llama(nn.Module):
    """Stage `stage` of `num_stages`. The first one embeds bytes, the last one returns logits; between stages goes
    float32 `[batch, context, dim]`."""

    def __init__(self, config: LlamaConfig, stage: int = 0, num_stages: int = 1, *, seed: int = 0) -> None:
        """The parameters depend on `seed` and their place in the whole model alone."""
        super().__init__()
        torch.manual_seed(seed)
        embedding = nn.Embedding(config.vocabulary, config.dim)
        blocks = [Block(config) for _ in range(config.num_layers)]
        output = nn.Linear(config.dim, config.vocabulary, bias=False)
        first, last = (config.num_layers * number // num_stages for number in (stage, stage + 1))
        is_last = stage == num_stages - 1
        self.embedding = embedding if stage == 0 else None
        self.layers = nn.ModuleDict({str(number): blocks[number] for number in range(first, last)})
        self.norm = nn.RMSNorm(config.dim) if is_last else None
        self.output = output if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is None or self.output is None:
            return x
        logits: Tensor = self.output(self.norm(x))
        return logits

    @property
    def norms(self) -> list[nn.Parameter]:
        """The parameters that tensor parallelism does not split."""
        return [each.weight for each in self.modules() if isinstance(each, nn.RMSNorm)]

    @property
    def tp_plan(self) -> dict[str, ParallelStyle]:
        """For `parallelize_module`."""
        plan: dict[str, ParallelStyle] = {}
        if self.embedding is not None:
            plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
        for number in self.layers:
            plan |= {f"layers.{number}.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
            plan |= {f"layers.{number}.feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
            plan |= {f"layers.{number}.{name}": RowwiseParallel() for name in ("attention.wo", "feed_forward.w2")}
        if self.output is not None:
            plan["output"] = ColwiseParallel(output_layouts=Replicate())
        return plan
