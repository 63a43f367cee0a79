"""Multi-head latent attention: a model as a stock DeepseekV3ForCausalLM (experimental).

The class normalises its latent. One more coordinate, a bias C far above the others, pins that norm:
it is C up to |latent|^2 / 2 C^2. Biases of queries go through a pinned low rank of full width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from headprune.config import CalibrationConfig, DataConfig, Dtype, ExportConfig, LatentConfig
from headprune.context import Context
from headprune.data.batches import calibration
from headprune.data.text import Sequences
from headprune.errors import HeadpruneError, PlanError, ProofError
from headprune.formats.checkpoint import OnStep
from headprune.formats.export import Exported, export_as
from headprune.formats.format import ExportProof, Format
from headprune.formats.source import ExportSource, open_source
from headprune.io.folders import copy_companions
from headprune.model.attention import attention_of
from headprune.model.heads import read_heads
from headprune.model.inspection import Inspection, LatentPrice
from headprune.model.loading import load_config, load_tokenizer
from headprune.model.open import open_model
from headprune.model.probes import probe, probe_inputs
from headprune.model.stored import fetch_weights, find_file
from headprune.result.equivalence import difference
from headprune.runtime.modeling_headprune import Attention
from headprune.surgery.latent import (
    Kept,
    Latent,
    Moments,
    gather,
    latent_of,
    projected,
    rank_of,
    rotary_components,
)

_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("rms_norm_eps", "max_position_embeddings", "initializer_range", "attention_dropout"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)
TYPES = ("llama", "mistral", "qwen2", "smollm3")
_PIN = 1e4  # over the norm of the pinned latent, which is 100 times as large at first tokens
_TOLERANCE = 1e-4  # of float32: the pin, and sums of other lengths
_HELD = 0.99  # of the variance
_OTHER_BALANCE = 3.0  # of K over V, tried beside 1
_ROPE_DIMS = (0.5, 0.625, 1.0, 1.5)  # over head_dim


def refusal(net: PreTrainedModel) -> str | None:
    """Return why a model has no latent form, as a sentence; None if it has one."""
    config, layer = net.config, attention_of(net)[0]
    if config.model_type not in TYPES:
        norms = [name for name in ("q_norm", "k_norm") if hasattr(layer.module, name)]
        if norms:
            return f"a {config.model_type} has norms after its projections ({', '.join(norms)})."
        return f"a {config.model_type} is none of {', '.join(TYPES)}."
    if getattr(config, "headprune", None) is not None:
        return "its layers differ in heads. Convert the original."
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases (mlp_bias)."
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) and window is not None:
        return f"its attention has a window (sliding_window {window})."
    kind = config.rope_parameters["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        return f"its rotary embedding is of type {kind}."
    return None


@dataclass(frozen=True)
class Fit:
    """Latents of all layers, and their loss.

    Attributes:
        latents: By module.
        kept: Rotary components per frequency.
        loss: Mean loss, in place, on the held-out text that chooses.
    """

    latents: dict[str, Latent]
    kept: Kept
    loss: float

    @property
    def rope_dim(self) -> int:
        """Width of the rotary key."""
        return 2 * sum(self.kept)

    @property
    def size(self) -> int:
        """Numbers in the cache per token and layer, the pinned coordinate included."""
        return len(next(iter(self.latents.values())).down) + 1 + self.rope_dim


class Fitter:
    """A model with the moments of a text, for latents of any size."""

    def __init__(
        self,
        net: PreTrainedModel,
        tokenizer: Any,
        data: DataConfig,
        config: CalibrationConfig,
        context: Context,
    ) -> None:
        reason = refusal(net)
        if reason is not None:
            raise PlanError(f"A latent cannot hold this model: {reason}")
        self.net, self.context = net.requires_grad_(False), context
        self.attentions = attention_of(net)
        self.text = calibration(net, tokenizer, data, config, "convert-mla")
        if not len(self.text.report.rows):  # all was for the fit
            some = {"calibration_tokens": 3 * self.text.fit.tokens // 4}
            config = config.model_copy(update=some)
            self.text = calibration(net, tokenizer, data, config, "convert-mla")
        context.stage("reading keys and values")
        self.moments = gather(net, self.attentions, self.text.fit, context.step)
        self._refuse_little_text()

    def _refuse_little_text(self) -> None:
        tokens = self.text.fit.tokens
        if tokens <= self.whole or not len(self.text.report.rows):
            raise HeadpruneError(
                f"The text has {tokens:,} tokens to fit to, and K and V have {self.whole:,} "
                "numbers. Give more text."
            )

    @property
    def first(self) -> Moments:
        """Moments of the first layer, for sizes that all share."""
        return next(iter(self.moments.values()))

    @property
    def whole(self) -> int:
        """Numbers of K and V per token and layer."""
        return 2 * self.first.width

    @cached_property
    def frequencies(self) -> Tensor:
        """Radians per token, of every pair of coordinates."""
        rotary: Tensor = self.net.base_model.rotary_emb.inv_freq
        return rotary.cpu().double()

    @cached_property
    def loss(self) -> float:
        """Mean loss of the original on held-out text that chooses nothing."""
        return self._loss(self.text.report)

    @torch.no_grad()
    def _loss(self, text: Sequences) -> float:
        losses = [float(self.net(**batch).loss) for batch in text.batches()]
        return sum(losses) / len(losses)

    def fit(self, rank: int, rope_dim: int, balance: float = 1.0) -> Fit:
        """Return latents of a rank, the pinned coordinate included, and a rotary width."""
        most = len(self.frequencies) * self.first.kv_heads
        if not (2 <= rank <= self.whole + 1 and 2 <= rope_dim <= 2 * most and rope_dim % 2 == 0):
            raise PlanError(
                f"--rank {rank} --rope-dim {rope_dim}: K and V have {self.whole} numbers, so a "
                f"rank is 2 to {self.whole + 1}, and a rotary width an even number to {2 * most}."
            )
        kept = rotary_components([*self.moments.values()], self.frequencies, rope_dim // 2)
        latents = {
            path: latent_of(one, self.frequencies, kept, rank - 1, balance)
            for path, one in self.moments.items()
        }
        with projected(self.net, self.attentions, latents):
            return Fit(latents, kept, self._loss(self.text.choose))

    def of_size(self, size: int) -> Fit:
        """Return the latents of a size that lose least on held-out text."""
        widths = {2 * round(share * self.first.head_dim / 2) for share in _ROPE_DIMS}
        tries = [(size - w, w) for w in sorted(widths) if 2 <= w <= size - 2]
        if not tries:
            raise PlanError(f"{size} numbers per token and layer are too few for a latent.")
        self.context.stage("trying latents")
        fits = []
        for number, (rank, width) in enumerate(tries, 1):
            fits.append(self.fit(min(rank, self.whole + 1), width))
            self.context.step(number, len(tries) + 1)
        best = min(fits, key=lambda fit: fit.loss)
        other = self.fit(best.size - best.rope_dim, best.rope_dim, _OTHER_BALANCE)
        self.context.step(len(tries) + 1, len(tries) + 1)
        return min(best, other, key=lambda fit: fit.loss)

    def ratio(self, fit: Fit) -> float:
        """Return the perplexity over the original's, on held-out text that chose nothing."""
        with projected(self.net, self.attentions, fit.latents):
            return math.exp(self._loss(self.text.report) - self.loss)

    def prices(self) -> tuple[LatentPrice, ...]:
        """Return the cost of latents of several sizes, measured in place."""
        element = self.bytes_per_token(1)
        prices = []
        for share in (0.75, 0.5, 0.375, 0.25):
            fit = self.of_size(int(share * self.whole))
            prices.append(
                LatentPrice(
                    kv_cache_bytes_per_token=fit.size * element,
                    rank=fit.size - fit.rope_dim,
                    rope_dim=fit.rope_dim,
                    lost=sum(latent.lost for latent in fit.latents.values()) / len(fit.latents),
                    perplexity_ratio=self.ratio(fit),
                )
            )
        return tuple(prices)

    def joint_ranks(self) -> dict[str, int]:
        """Return the rank of [K without rotation; V] that holds 99 % of its variance, by module."""
        kept = rotary_components(
            [*self.moments.values()], self.frequencies, self.first.head_dim // 4
        )
        return {
            path: rank_of(one, self.frequencies, kept, _HELD) for path, one in self.moments.items()
        }

    def bytes_per_token(self, size: int) -> int:
        """Return the bytes of cache per token for a size, in 16 bits."""
        return 2 * size * len(self.attentions)


def priced(
    inspected: Inspection, model: str | Path, data: DataConfig, context: Context
) -> Inspection:
    """Add the price of latent attention to an inspection; see ``Fitter``."""
    opened = open_model(model, Dtype.FLOAT32, context.allowed)
    fitter = Fitter(opened.net, opened.tokenizer, data, CalibrationConfig(), context)
    update = {"joint_ranks": fitter.joint_ranks(), "latents": fitter.prices()}
    return inspected.model_copy(update=update)


def convert_mla(
    model: str | Path,
    output: Path,
    config: LatentConfig,
    data: DataConfig,
    overwrite: bool = False,
    context: Context = Context(),
) -> Exported:
    """Convert a model to latent attention, proven; the output appears whole or not at all.

    Raises:
        HeadpruneError: If a latent cannot hold the model, or the text is too short.
        ProofError: If the folder computes something else than the projected original.
    """
    conversion = _Conversion(config, data, context)
    form = Format(
        what="a DeepseekV3ForCausalLM",
        refusal=lambda source, _: refusal(source.net),
        write=conversion.write,
        prove=conversion.prove,
    )
    as_export, folder = ExportConfig(to="mla"), _in_a_folder(model)
    return export_as(form, "convert-mla", folder, output, as_export, overwrite, context)


def _in_a_folder(model: str | Path) -> str | Path:
    """Return the folder of a model; one of the hub is brought into the cache."""
    if Path(model).is_dir():
        return model
    load_tokenizer(model, load_config(model))
    fetch_weights(model)
    config = find_file(model, "config.json")
    return model if config is None else config.parent


class _Conversion:
    """The state between writing and proof."""

    def __init__(self, config: LatentConfig, data: DataConfig, context: Context) -> None:
        self.config, self.data, self.context = config, data, context

    def write(
        self, source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
    ) -> tuple[str, ...]:
        self.net = source.load()
        tokenizer = load_tokenizer(source.folder, source.config)
        self.fitter = fitter = Fitter(self.net, tokenizer, self.data, self.config, self.context)
        self.fit = self._fit()
        self.result = converted(self.net, fitter, self.fit)
        inputs = probe_inputs(self.net)
        with projected(self.net, fitter.attentions, self.fit.latents):
            self.wanted = probe(self.net, inputs, decoded=False)
        wrong = {path: _misplaced(latent) for path, latent in self.fit.latents.items()}
        with projected(self.net, fitter.attentions, wrong):
            self.control = difference(self.wanted, probe(self.net, inputs, decoded=False))
        self.gap = difference(self.wanted, probe(self.result, inputs, decoded=False))
        stored = next(iter(source.weights.values())).dtype
        for parameter in self.result.parameters():  # and not the frequencies
            parameter.data = parameter.data.to(stored)
        self.result.save_pretrained(folder)
        self.result.float()
        copy_companions(source.folder, folder)
        before, after = (fitter.bytes_per_token(n) for n in (fitter.whole, self.fit.size))
        return (
            f"KV cache: {before:,} bytes per token become {after:,} in 16 bits: rank "
            f"{self.fit.size - self.fit.rope_dim}, rotary width {self.fit.rope_dim}.",
            f"Perplexity on held-out text: {fitter.ratio(self.fit):.3f} times the original's.",
            "transformers computes the bias that pins the norm. Engines that build DeepSeek "
            "without it answer nonsense: compare before you serve it.",
        )

    def _fit(self) -> Fit:
        config, fitter = self.config, self.fitter
        if config.kv_bytes is not None:
            size = config.kv_bytes // fitter.bytes_per_token(1)
            if size >= fitter.whole:
                most = fitter.bytes_per_token(fitter.whole)
                raise PlanError(f"--kv-bytes {config.kv_bytes}: the model has only {most:,}.")
            return fitter.of_size(size)
        assert config.rank is not None
        assert config.rope_dim is not None
        return fitter.fit(config.rank, config.rope_dim)

    def prove(self, source: ExportSource, folder: Path, config: ExportConfig) -> ExportProof:
        if not self.control > 10 * _TOLERANCE:
            raise ProofError(f"The proof is inconclusive: a misplaced head moves {self.control}.")
        inputs = probe_inputs(self.result)
        reloaded = difference(probe(self.result, inputs), probe(open_source(folder).load(), inputs))
        return ExportProof(
            how="read back",
            engine="transformers",
            why_not="no engine runs here",
            compared="projected original, converted and reloaded",
            difference=max(self.gap, reloaded),
            tolerance=_TOLERANCE,
            details={"reloaded alone": reloaded, "one head misplaced": self.control},
        )


def _misplaced(latent: Latent) -> Latent:
    """Return a latent whose K and V go to the wrong coordinates."""
    vectors = {name: getattr(latent, name).roll(1, 0) for name in ("rotary_up", "up", "mean")}
    return Latent(**{**vars(latent), **vectors})


@torch.no_grad()
def converted(net: PreTrainedModel, fitter: Fitter, fit: Fit) -> PreTrainedModel:
    """Return the model with latent attention, in float32."""
    config = _config(net, fitter, fit)
    result: PreTrainedModel = DeepseekV3ForCausalLM(config).float().eval()
    weights = {n: w for n, w in net.state_dict().items() if ".self_attn." not in n}
    for attention, layer in zip(fitter.attentions, net.base_model.layers, strict=True):
        norm = float(layer.input_layernorm.weight.abs().max())
        own = _attention_weights(attention, fit.latents[attention.path], config, norm)
        weights |= {f"{attention.path}.{name}": weight.float() for name, weight in own.items()}
    result.load_state_dict(weights)
    return result


def _config(net: PreTrainedModel, fitter: Fitter, fit: Fit) -> DeepseekV3Config:
    own, moments = net.config, fitter.first
    same = {name: getattr(own, name) for name in _SAME}
    biased = any(read_heads(a).q_bias is not None for a in fitter.attentions)
    theta = own.rope_parameters["rope_theta"]
    places = torch.tensor([j for j, k in enumerate(fit.kept) for _ in range(k)])
    grid = theta ** (-torch.arange(0, fit.rope_dim, 2).double() / fit.rope_dim)
    factors = (grid / fitter.frequencies[places]).tolist()
    return DeepseekV3Config(
        **same,
        num_attention_heads=moments.heads,
        num_key_value_heads=moments.heads,
        first_k_dense_replace=own.num_hidden_layers,
        num_mtp_layers=0,
        kv_lora_rank=fit.size - fit.rope_dim,
        q_lora_rank=own.hidden_size + 1 if biased else None,
        qk_rope_head_dim=fit.rope_dim,
        qk_nope_head_dim=moments.head_dim,
        v_head_dim=moments.head_dim,
        attention_bias=True,
        rope_interleave=False,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "factor": 1.0,
        },
    )


def _attention_weights(
    attention: Attention, latent: Latent, config: DeepseekV3Config, norm: float
) -> dict[str, Tensor]:
    """Return the tensors of one layer's attention; ``norm`` bounds the norm before it."""
    heads = read_heads(attention)
    owners = heads.owners
    q, k, v = (heads.affine(role).double() for role in ("q", "k", "v"))
    hidden, count = config.hidden_size, len(owners)
    both = torch.cat([_with_bias(k, hidden).flatten(0, 1), _with_bias(v, hidden).flatten(0, 1)])
    into = latent.down @ both
    into[:, -1] -= latent.shift
    rotary = latent.rotary_down @ both[: len(both) // 2]
    pin, weight, factor = _pinned(latent.size**0.5, config.kv_lora_rank)
    constant = torch.zeros(1, hidden + 1).double()
    constant[0, -1] = pin
    down = torch.cat([into, constant, rotary])
    out = torch.cat([latent.up, latent.mean[:, None] / pin], 1) * factor
    keys, values = out.unflatten(0, (2, len(heads.k), -1))
    up = torch.cat([keys[owners], values[owners]], 1).flatten(0, 1)
    rotary_up = latent.rotary_up.unflatten(0, (len(heads.k), -1))[owners]
    scale = attention.module.scaling * config.qk_head_dim**0.5
    queries = scale * torch.cat([q, rotary_up.mT @ q], 1).flatten(0, 1)
    o_bias = torch.zeros(hidden) if heads.o_bias is None else heads.o_bias
    tensors = {
        "kv_a_proj_with_mqa.weight": down[:, :-1],
        "kv_a_proj_with_mqa.bias": down[:, -1],
        "kv_a_layernorm.weight": torch.full((config.kv_lora_rank,), weight),
        "kv_b_proj.weight": up,
        "o_proj.weight": heads.o.permute(1, 0, 2).flatten(1),
        "o_proj.bias": o_bias,
    }
    if config.q_lora_rank is None:
        return tensors | {"q_proj.weight": queries}
    pin, weight, factor = _pinned(hidden**0.5 * norm, hidden + 1)
    queries = _with_bias(queries.unflatten(0, (count, -1)), hidden).flatten(0, 1)
    queries[:, -1] /= pin
    last = torch.zeros(hidden + 1)
    last[-1] = pin
    return tensors | {
        "q_a_proj.weight": torch.eye(hidden + 1, hidden),
        "q_a_proj.bias": last,
        "q_a_layernorm.weight": torch.full((hidden + 1,), weight),
        "q_b_proj.weight": queries * factor,
    }


def _with_bias(weight: Tensor, hidden: int) -> Tensor:
    """Return a map of the input with a 1 at its end, of one with or without a bias."""
    return nn.functional.pad(weight, (0, hidden + 1 - weight.shape[-1]))


def _pinned(norm: float, width: int) -> tuple[float, float, float]:
    """Return the bias, the norm's weight, and the factor of what follows.

    The first two are numbers of bfloat16, and the factor makes up for their rounding.
    """
    pin = 2.0 ** math.ceil(math.log2(_PIN * max(norm, 1e-6)))
    weight = float(torch.tensor(pin / width**0.5).bfloat16())
    return pin, weight, pin / (weight * width**0.5)
