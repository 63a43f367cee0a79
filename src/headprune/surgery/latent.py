"""Keys and values of all heads from one latent and one rotary key, as in DeepSeek's MLA.

Keys are turned, frequency by frequency, over the KV heads, which commutes with rotary embeddings.
Of the fastest frequencies the first component stays rotary. The rest takes its mean rotation over
the distances that attention looks back. This rest and V have one linear latent of low rank
(TransMLA 2502.07864, CARE 2603.17946). The mean rotation, and weights of tokens by the attention
that they receive, are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.data.text import Sequences
from headprune.model.heads import read_heads
from headprune.model.passes import eager_attention, run_model
from headprune.model.placement import input_device
from headprune.model.recording import RecordedCall, recording
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors.rotary import RotaryPairs

_SMALLEST = 1e-9  # share of the largest eigenvalue of a metric
_NOTHING = 1e-30  # in place of zero, of layers whose W_Q, W_V or W_O is zero


@dataclass
class AttentionMoments:
    """Second moments of one module's attention on text.

    Attributes:
        heads: Its query heads.
        kv_heads: Its KV heads.
        head_dim: Their width.
        output: Second moment of W_O's rows, per query head; shape (heads, head_dim, head_dim).
        query: Sum of outer products of queries before rotation, per head; the same shape.
        joint: Weighted sum of outer products of [K; V] before rotation. Half of a token's weight is
            the attention that it receives.
        total: Weighted sum of [K; V].
        tokens: Number of tokens.
        distances: Attention by distance, summed.
        rotates: Whether keys are rotated.
        biased: Whether projections have biases, so that a latent may have one.
    """

    heads: int
    kv_heads: int
    head_dim: int
    output: Tensor
    query: Tensor
    joint: Tensor
    total: Tensor
    distances: Tensor
    tokens: int = 0
    rotates: bool = False
    biased: bool = False

    @property
    def width(self) -> int:
        """Numbers of all keys, or of all values."""
        return self.kv_heads * self.head_dim

    def by_kv_head(self, of_heads: Tensor) -> Tensor:
        """Sum a quantity of query heads over the heads of each KV head."""
        summed: Tensor = of_heads.unflatten(0, (self.kv_heads, -1)).sum(1)
        return summed

    def metric(self) -> tuple[Tensor, Tensor]:
        """Return the weights of errors in K and in V: by queries, and by W_O."""
        key = self.by_kv_head(self.query) / self.tokens / self.head_dim
        return torch.block_diag(*key), torch.block_diag(*self.by_kv_head(self.output))

    def mean_rotation(self, frequencies: Tensor) -> Tensor:
        """Return the mean rotation of a key, per frequency, over the distances of attention."""
        if not self.rotates:
            return torch.ones_like(frequencies).to(torch.complex128)
        weights = self.distances / self.distances.sum()
        angles = torch.outer(frequencies, torch.arange(len(weights)).double())
        return (weights * torch.exp(-1j * angles)).sum(1)


@dataclass(frozen=True)
class Latent:
    """The maps of one module; K and V are those of all heads, before rotation.

    Attributes:
        rotary_down: From K to the rotary key; shape (rope_dim, width).
        rotary_up: Back; shape (width, rope_dim).
        down: From [K; V] to the latent; shape (rank, 2 width).
        offset: Added to the latent; shape (rank,). It subtracts the mean of the unrotated K, which
            adds the same to all scores of a query.
        up: From the latent to [K without rotation; V]; shape (2 width, rank).
        lost: Share of the weighted variance that the rank leaves out.
        mean_square: Of the latent's numbers.
    """

    rotary_down: Tensor
    rotary_up: Tensor
    down: Tensor
    offset: Tensor
    up: Tensor
    lost: float
    mean_square: float


def gather(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    text: Sequences,
    on_step: Callable[[int, int], None],
) -> dict[str, AttentionMoments]:
    """Read the moments of all modules in one pass over a text.

    Args:
        model: The model.
        attentions: Its attention modules.
        text: Sequences without padding.
        on_step: Called with batches done and in all.
    """
    found = {a.path: _empty(a, text) for a in attentions}

    def attend(call: RecordedCall, path: str, raw: Mapping[str, Tensor]) -> Tensor:
        moments = found[path]
        width = moments.head_dim
        query, key = (raw[role].unflatten(-1, (-1, width)).transpose(1, 2) for role in ("q", "k"))
        smallest = 1e-6 * float(key.abs().max())
        moments.rotates |= not torch.allclose(key, call.key.float(), rtol=1e-2, atol=smallest)
        flat = query.transpose(0, 1).flatten(1, 2).double()
        moments.query += flat.transpose(1, 2) @ flat
        length = call.query.shape[2]
        rows = torch.arange(length, device=key.device)
        back = (rows[:, None] - rows).clamp(min=0).flatten()
        for number in range(len(query)):
            part = slice(number, number + 1)
            seen = call.probabilities(call.query[part], call.key[part], part, rows)[0].mean(0)
            moments.distances.index_add_(0, back, seen.double().flatten())
            joint = torch.cat([raw["k"][number], raw["v"][number]], -1).double()
            weights = (1 + seen.double().sum(0)) / 2
            moments.joint += (joint * weights[:, None]).T @ joint
            moments.total += weights @ joint
            moments.tokens += length
        return call.outputs()

    batches = text.batches()
    with _attending(model, attentions, attend), torch.no_grad():
        for done, batch in enumerate(batches, 1):
            run_model(model, batch)
            on_step(done, len(batches))
    return {path: _moved(moments, "cpu") for path, moments in found.items()}


def _empty(attention: Attention, text: Sequences) -> AttentionMoments:
    heads = read_heads(attention)
    count, width = heads.q.shape[:2]
    joint = 2 * len(heads.k) * width
    outputs = heads.o.double()
    moments = AttentionMoments(
        count,
        len(heads.k),
        width,
        outputs.transpose(1, 2) @ outputs,
        torch.zeros(count, width, width).double(),
        torch.zeros(joint, joint).double(),
        torch.zeros(joint).double(),
        torch.zeros(text.longest or max(len(row) for row in text.rows["input_ids"])).double(),
        biased=heads.k_bias is not None,
    )
    return _moved(moments, outputs.device)


Maps = TypeVar("Maps", "AttentionMoments", "Latent")


def _moved(maps: Maps, device: torch.device | str, dtype: torch.dtype = torch.float64) -> Maps:
    """Return moments or maps with their tensors on a device, in an element type."""
    tensors = {name: value for name, value in vars(maps).items() if torch.is_tensor(value)}
    moved: dict[str, Any] = {name: value.to(device, dtype) for name, value in tensors.items()}
    return replace(maps, **moved)


def _principal(moments: AttentionMoments) -> tuple[Tensor, Tensor]:
    """Return the components of keys over KV heads by frequency, and the heads' weights."""
    pairs = RotaryPairs.halves(moments.head_dim, moments.head_dim)
    real, imaginary = pairs.first, pairs.second
    second = moments.joint[: moments.width, : moments.width] / moments.tokens
    second = second.unflatten(0, (moments.kv_heads, -1)).unflatten(2, (moments.kv_heads, -1))
    both = second[:, real, :, real] + second[:, imaginary, :, imaginary]
    turned = second[:, imaginary, :, real] - second[:, real, :, imaginary]
    energy = moments.query.diagonal(dim1=1, dim2=2)
    of_queries = moments.by_kv_head(energy[:, real] + energy[:, imaginary])
    weights = (of_queries / moments.tokens).T.clamp(min=1e-12).sqrt()
    weighted = weights[:, :, None] * torch.complex(both, turned) * weights[:, None, :]
    return torch.linalg.eigh(weighted).eigenvectors[..., -1], weights


def latent_of(
    moments: AttentionMoments,
    frequencies: Tensor,
    rope_dim: int,
    rank: int | float,
    balance: float = 1.0,
) -> Latent:
    """Return the maps of one module that lose least.

    Args:
        moments: Of the module.
        frequencies: Radians per token, the fastest first.
        rope_dim: Width of the rotary key: twice the frequencies that stay rotary.
        rank: Width of the latent; below 1, the share of the weighted variance that it holds.
        balance: Weight of errors in K over those in V, once both are scaled alike.
    """
    components, weights = _principal(moments)
    kept = slice(0, rope_dim // 2)
    rotary_down = _real((components.conj() * weights)[kept], moments)
    rotary_up = _real((components / weights).conj()[kept], moments).T
    if not moments.rotates:
        rotary_down, rotary_up = torch.zeros_like(rotary_down), torch.zeros_like(rotary_up)
    mean_rotation = moments.mean_rotation(frequencies)
    cos, sin = mean_rotation.real.diag(), mean_rotation.imag.diag()
    turn = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
    width = moments.width
    rest = torch.eye(width).double() - rotary_up @ rotary_down
    rest = torch.block_diag(*[turn] * moments.kv_heads) @ rest
    unrotated = torch.block_diag(rest, torch.eye(width).double())
    joint, mean = moments.joint / moments.tokens, moments.total / moments.tokens
    of_keys, of_values = moments.metric()
    centre = torch.zeros_like(mean)
    if moments.biased:
        centre[:width] = mean[:width]
    joint = joint - torch.outer(mean, centre) - torch.outer(centre, mean - centre)
    second = unrotated @ joint @ unrotated.T
    scale = (of_keys @ joint[:width, :width]).trace().clamp(min=_NOTHING)
    of_values = of_values * scale / (of_values @ joint[width:, width:]).trace().clamp(min=_NOTHING)
    root, inverse = _roots(torch.block_diag(balance * of_keys, of_values))
    energies, directions = torch.linalg.eigh(root @ second @ root)
    energies = energies.clamp(min=0)
    if rank < 1:
        rank = 1 + int((energies.flip(0).cumsum(0) < rank * energies.sum()).sum())
    top, held = directions[:, -int(rank) :], float(energies[-int(rank) :].sum())
    lost = max(1 - held / max(float(energies.sum()), _NOTHING), 0.0)
    down = top.T @ root @ unrotated
    mean_square = held / int(rank)
    return Latent(rotary_down, rotary_up, down, -down @ centre, inverse @ top, lost, mean_square)


def _real(rows: Tensor, moments: AttentionMoments) -> Tensor:
    """Return complex rows over KV heads, one per frequency, as a real map of all keys."""
    count, half = len(rows), moments.head_dim // 2
    real, at = torch.zeros(2, count, moments.kv_heads, 2, half).double(), torch.arange(count)
    real[0, at, :, 0, at] = real[1, at, :, 1, at] = rows.real
    real[0, at, :, 1, at], real[1, at, :, 0, at] = -rows.imag, rows.imag
    return real.reshape(2 * count, moments.width)


def _roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root of a metric, and its inverse."""
    values, vectors = torch.linalg.eigh(metric)
    roots = values.clamp(min=max(_SMALLEST * float(values.max()), _NOTHING)).sqrt()
    return vectors * roots @ vectors.T, vectors / roots @ vectors.T


@contextmanager
def projected(
    model: PreTrainedModel, attentions: Sequence[Attention], latents: Mapping[str, Latent]
) -> Iterator[None]:
    """Make the keys and values of a model pass through latents, in place, without a cache."""
    dtype = torch.promote_types(model.dtype, torch.float32)
    device = input_device(model)
    maps = {path: _moved(latent, device, dtype) for path, latent in latents.items()}

    def attend(call: RecordedCall, path: str, raw: Mapping[str, Tensor]) -> Tensor:
        latent, heads = maps[path], call.key.shape[1]
        rotated = call.key.to(dtype).transpose(1, 2).flatten(2)
        rotated = rotated @ latent.rotary_down.T @ latent.rotary_up.T
        joint = torch.cat([raw["k"], raw["v"]], -1) @ latent.down.T + latent.offset
        rest, value = (joint @ latent.up.T).chunk(2, -1)
        split = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (rotated, rest, value)]
        query = raw["q"].unflatten(-1, (call.query.shape[1], -1)).transpose(1, 2)
        changed = replace(
            call,
            query=torch.cat([call.query.to(dtype), query], -1).to(call.query),
            key=torch.cat(split[:2], -1).to(call.key),
            value=split[2].to(call.value),
        )
        return changed.outputs()

    with _attending(model, attentions, attend):
        yield


@contextmanager
def _attending(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    attend: Callable[[RecordedCall, str, Mapping[str, Tensor]], Tensor],
) -> Iterator[None]:
    """Replace the attention function; it also gets the outputs of the module's projections."""
    paths = {id(a.module): a.path for a in attentions}
    raw: dict[str, dict[str, Tensor]] = {path: {} for path in paths.values()}

    def keep(path: str, role: str, module: nn.Module, args: object, output: Tensor) -> None:
        raw[path][role] = output.to(torch.promote_types(output.dtype, torch.float32))

    def recorded(call: RecordedCall) -> Tensor:
        path = paths[id(call.module)]
        return attend(call, path, raw[path])

    with ExitStack() as stack:
        stack.enter_context(eager_attention(model))
        for a in attentions:
            for p in a.projections:
                if p.holds in ("q", "k", "v"):
                    hook = p.module.register_forward_hook(partial(keep, a.path, p.holds))
                    stack.callback(hook.remove)
        stack.enter_context(recording(attentions, recorded))
        yield
