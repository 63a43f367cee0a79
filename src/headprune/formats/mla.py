"""Multi-head latent attention: a model as a stock DeepseekV3ForCausalLM.

The class normalises its latent: x / sqrt(mean(x^2) + eps). Latents are so small that eps decides:
the norm then is a constant factor, up to mean(x^2) / 2 eps. transformers takes 1e-6 here, engines
the config's rms_norm_eps. So that becomes 1e-6, and everything added to the residual stream is
scaled alike. Biases of projections, as in Qwen2, need the class's attention_bias; those of queries
go through a low rank of full width. The output matrix is a tensor of its own, as engines want it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from headprune.config import CalibrationConfig, DataConfig, Dtype, ExportConfig, LatentConfig
from headprune.context import Context
from headprune.data.batches import calibration
from headprune.errors import HeadpruneError, PlanError, ProofError
from headprune.evidence.losses import mean_loss
from headprune.formats.checkpoint import OnStep
from headprune.formats.export import Exported, export_as
from headprune.formats.format import ExportProof, Format
from headprune.formats.source import ExportSource, open_source
from headprune.io.folders import copy_companions, source_folder
from headprune.io.outputs import claimed, place_of
from headprune.model.attention import attention_of
from headprune.model.config_file import write_config
from headprune.model.heads import read_heads
from headprune.model.inspection import Inspection, LatentPrice
from headprune.model.loading import load_config, load_tokenizer, task_of
from headprune.model.open import open_model
from headprune.model.placement import alone_on_device, move_to_device
from headprune.model.probes import probe, probe_inputs
from headprune.model.stored import fetch_weights
from headprune.proof.equivalence import difference
from headprune.runtime.modeling_headprune import Attention
from headprune.surgery.latent import (
    AttentionMoments,
    Latent,
    gather,
    latent_of,
    projected,
)
from headprune.surgery.sharpness import larger_queries, sharpest
from headprune.tensors.dtypes import dtype_name

_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("max_position_embeddings", "initializer_range", "attention_dropout"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
TYPES = ("llama", "mistral", "qwen2", "smollm3")
_EPS = 1e-6  # of DeepseekV3RMSNorm
_SMALL = 1e-12  # mean square of a latent, in units of _EPS; of first tokens up to 1e6 times that
_TOLERANCE = 1e-5  # of weights in float32: 1e-6 measured on SmolLM2 and Qwen2.5
_HELD = 0.99  # of the variance
_CONTROL = "every coordinate misplaced by one"
_OTHER_BALANCE = 3.0  # of K over V, tried beside 1
_ROPE_DIMS = (0.375, 0.5, 0.625, 0.75, 1.0)  # over head_dim
_BIASED = (
    "Its projections have biases. vLLM builds DeepSeek without them and answers nonsense: serve "
    "it by transformers."
)


def refusal(net: PreTrainedModel) -> str | None:
    """Return why a model has no latent form, as a sentence; None if it has one."""
    config, layer = net.config, attention_of(net)[0]
    if task_of(net) != "causal-lm":
        return f"its task is {task_of(net)}, and the class is a language model."
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
        rank: Width of the latent.
        rope_dim: Width of the rotary key.
        sharpness: Factor of all scores.
        loss: Mean loss, in place, on the held-out text that chooses.
    """

    latents: dict[str, Latent]
    rank: int
    rope_dim: int
    sharpness: float = 1.0
    loss: float = math.nan

    @property
    def size(self) -> int:
        """Numbers in the cache per token and layer."""
        return self.rank + self.rope_dim


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
                f"The text has {tokens:,} tokens to fit to and {len(self.text.report.rows):,} "
                f"held-out sequences. More than {self.whole:,} tokens, as K and V have numbers, "
                "and one sequence are needed. Give more text."
            )

    @property
    def first(self) -> AttentionMoments:
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
        return mean_loss(self.net, self.text.report)

    @cached_property
    def _original(self) -> float:
        """Mean loss of the original on held-out text that chooses."""
        return mean_loss(self.net, self.text.choose)

    def fit(self, rank: int, rope_dim: int, balance: float = 1.0) -> Fit:
        """Return latents of a rank and a rotary width."""
        most = self.first.head_dim
        if not (1 <= rank <= self.whole and 2 <= rope_dim <= most and rope_dim % 2 == 0):
            raise PlanError(
                f"--rank {rank} --rope-dim {rope_dim}: a rank is 1 to {self.whole}, the numbers of "
                f"K and V, and a rotary width an even number to {most}, the head_dim."
            )
        latents = {
            path: latent_of(one, self.frequencies, rope_dim, rank, balance)
            for path, one in self.moments.items()
        }
        return self._measured(Fit(latents, rank, rope_dim))

    @contextmanager
    def in_place(self, fit: Fit) -> Iterator[None]:
        """Make the model compute as one with these latents, in a ``with`` block."""
        with (
            larger_queries(self.attentions, fit.sharpness),
            projected(self.net, self.attentions, fit.latents),
        ):
            yield

    def _measured(self, fit: Fit) -> Fit:
        with self.in_place(fit):
            return replace(fit, loss=mean_loss(self.net, self.text.choose))

    def sharpened(self, fit: Fit) -> Fit:
        """Return a fit with the factor of scores that loses least on held-out text."""
        tried = {1.0: fit}

        def loss(factor: float) -> float:
            if factor not in tried:
                tried[factor] = self._measured(replace(fit, sharpness=factor))
            return tried[factor].loss

        return tried[sharpest(loss, self._original)]

    def of_size(self, size: int) -> Fit:
        """Return the latents of a size that lose least on held-out text."""
        widths = {2 * round(share * self.first.head_dim / 2) for share in _ROPE_DIMS}
        tries = [(size - w, w) for w in sorted(widths) if 2 <= w < size]
        if not tries:
            least = self.bytes_per_token(min(w for w in widths if w >= 2) + 1)
            raise PlanError(f"--kv-bytes: a latent of this model needs {least:,} at least.")
        self.context.stage("trying latents")
        fits = []
        for number, (rank, width) in enumerate(tries, 1):
            fits.append(self.fit(rank, width))
            self.context.step(number, len(tries) + 2)
        best = min(fits, key=lambda fit: fit.loss)
        other = self.fit(best.rank, best.rope_dim, _OTHER_BALANCE)
        self.context.step(len(tries) + 1, len(tries) + 2)
        best = self.sharpened(min(best, other, key=lambda fit: fit.loss))
        self.context.step(len(tries) + 2, len(tries) + 2)
        return best

    def ratio(self, fit: Fit) -> float:
        """Return the perplexity in place over the original's, on text that chose nothing."""
        original = self.loss  # before ``in_place`` changes the net
        with self.in_place(fit):
            return math.exp(mean_loss(self.net, self.text.report) - original)

    def ratio_of(self, net: PreTrainedModel) -> float:
        """Return the same of another model."""
        return math.exp(mean_loss(net, self.text.report) - self.loss)

    def prices(self) -> tuple[LatentPrice, ...]:
        """Return the cost of latents of several sizes, measured in place."""
        element = self.bytes_per_token(1)
        prices = []
        for share in (0.75, 0.5, 0.375, 0.25):
            fit = self.of_size(int(share * self.whole))
            prices.append(
                LatentPrice(
                    kv_cache_bytes_per_token=fit.size * element,
                    rank=fit.rank,
                    rope_dim=fit.rope_dim,
                    lost=sum(latent.lost for latent in fit.latents.values()) / len(fit.latents),
                    perplexity_ratio=self.ratio(fit),
                )
            )
        return tuple(prices)

    def joint_ranks(self) -> dict[str, int]:
        """Return the rank of [K without rotation; V] that holds 99 % of its variance, by module."""
        width = 2 * (self.first.head_dim // 4)
        latents = {p: latent_of(m, self.frequencies, width, _HELD) for p, m in self.moments.items()}
        return {path: len(latent.down) for path, latent in latents.items()}

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
    conversion = _LatentFormat(config, data, context)
    form = Format(
        what="a DeepseekV3ForCausalLM",
        refusal=lambda source, _: refusal(source.net),
        write=conversion.write,
        prove=conversion.prove,
    )
    as_export = ExportConfig(to="mla")
    with claimed(output, overwrite, (place_of(model), place_of(data))):
        load_config(model)  # names a wrong id
        fetch_weights(model)
        folder = source_folder(model)
        return export_as(form, "convert-mla", folder, output, as_export, overwrite, context)


class _LatentFormat:
    """The state between writing and proof."""

    def __init__(self, config: LatentConfig, data: DataConfig, context: Context) -> None:
        self.config, self.data, self.context = config, data, context

    def write(
        self, source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
    ) -> tuple[str, ...]:
        self.net = move_to_device(source.load())
        tokenizer = load_tokenizer(source.folder, source.config)
        sample = self.config.part(CalibrationConfig)
        self.fitter = fitter = Fitter(self.net, tokenizer, self.data, sample, self.context)
        self.fit = self._chosen()
        self.result = converted(self.net.cpu(), fitter, self.fit)
        self._compare()
        stored = next(iter(source.weights.values())).dtype
        stored = torch.bfloat16 if stored is torch.float16 else stored  # which latents underflow
        for parameter in self.result.parameters():  # and not the frequencies
            parameter.data = parameter.data.to(stored)
        self.result.save_pretrained(folder)
        write_config(self.result.config, folder, None)
        outputs = probe(move_to_device(self.result.float()), probe_inputs(self.net), decoded=False)
        self.details[f"stored in {dtype_name(stored)}"] = difference(self.wanted, outputs)
        copy_companions(source.folder, folder)
        ratio = fitter.ratio_of(self.result)
        before, after = (fitter.bytes_per_token(n) for n in (fitter.whole, self.fit.size))
        return (
            f"KV cache: {before:,} bytes per token become {after:,} in 16 bits: rank "
            f"{self.fit.rank}, rotary width {self.fit.rope_dim}, scores x {self.fit.sharpness:g}.",
            f"Perplexity on held-out text: {ratio:.3f} times the original's.",
            "Latents are about 1e-9, too small for float16 and for blocks of 8 or 4 bits. So it is "
            "written, and has to run, in bfloat16 or float32.",
            *[_BIASED] * bool(self.result.config.attention_bias),
        )

    def _compare(self) -> None:
        """Compare the result with the original in place, and that with misplaced coordinates.

        In float64: float32 rounds 5e-4 where large biases cancel, as in Qwen2.5.
        """
        for net in (self.net, self.result):
            net.double()
        inputs = probe_inputs(self.net)
        outputs = []
        with alone_on_device(self.net):
            for fit in (self.fit, _misplaced(self.fit)):
                with self.fitter.in_place(fit):
                    outputs.append(probe(self.net, inputs, decoded=False))
        self.wanted = outputs[0]
        with alone_on_device(self.result):
            self.gap = difference(self.wanted, probe(self.result, inputs, decoded=False))
        self.details = {_CONTROL: difference(*outputs)}
        for net in (self.net, self.result):
            net.float()

    def _chosen(self) -> Fit:
        config, fitter = self.config, self.fitter
        if config.kv_bytes is not None:
            size = config.kv_bytes // fitter.bytes_per_token(1)
            if size >= fitter.whole:
                most = fitter.bytes_per_token(fitter.whole)
                raise PlanError(f"--kv-bytes {config.kv_bytes}: the model has {most:,} already.")
            return fitter.of_size(size)
        assert config.rank is not None
        assert config.rope_dim is not None
        return fitter.sharpened(fitter.fit(config.rank, config.rope_dim))

    def prove(self, source: ExportSource, folder: Path, config: ExportConfig) -> ExportProof:
        control = self.details[_CONTROL]
        if not control > 10 * _TOLERANCE:
            raise ProofError(f"The proof is inconclusive: {_CONTROL} moves {control}.")
        inputs = probe_inputs(self.result)
        both = (self.result, move_to_device(open_source(folder).load()))
        reloaded = difference(*(probe(net, inputs) for net in both))
        return ExportProof(
            how="engine",
            engine=f"transformers {metadata.version('transformers')}",
            compared="projected original, converted and reloaded",
            difference=max(self.gap, reloaded),
            tolerance=_TOLERANCE,
            details={"reloaded alone": reloaded, **self.details},
        )


def _misplaced(fit: Fit) -> Fit:
    """Return latents whose K and V go to the wrong coordinates."""
    latents = {
        path: replace(one, rotary_up=one.rotary_up.roll(1, 0), up=one.up.roll(1, 0))
        for path, one in fit.latents.items()
    }
    return replace(fit, latents=latents)


@torch.no_grad()
def converted(net: PreTrainedModel, fitter: Fitter, fit: Fit) -> PreTrainedModel:
    """Return the model with latent attention, in float32."""
    config = _config(net, fitter, fit)
    result: PreTrainedModel = DeepseekV3ForCausalLM(config).float().eval()
    weights = {n: w for n, w in net.state_dict().items() if ".self_attn." not in n}
    for attention, layer in zip(fitter.attentions, net.base_model.layers, strict=True):
        norm = float(layer.input_layernorm.weight.abs().max())
        own = _attention_weights(attention, fit, config, norm)
        weights |= {f"{attention.path}.{name}": weight for name, weight in own.items()}
    scale = (_EPS / net.config.rms_norm_eps) ** 0.5
    for name, weight in weights.items():
        if "embed_tokens" in name or ".o_proj." in name or ".down_proj." in name:
            weights[name] = weight * scale
    result.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return result


def _config(net: PreTrainedModel, fitter: Fitter, fit: Fit) -> DeepseekV3Config:
    own, moments = net.config, fitter.first
    heads = [read_heads(attention) for attention in fitter.attentions]
    theta = own.rope_parameters["rope_theta"]
    return DeepseekV3Config(
        **{name: getattr(own, name) for name in _SAME},
        rms_norm_eps=_EPS,
        tie_word_embeddings=False,  # vLLM shares no weights in this class
        num_attention_heads=moments.heads,
        num_key_value_heads=moments.heads,
        first_k_dense_replace=own.num_hidden_layers,
        num_mtp_layers=0,
        kv_lora_rank=fit.rank,
        q_lora_rank=own.hidden_size + 1 if any(h.q_bias is not None for h in heads) else None,
        qk_rope_head_dim=fit.rope_dim,
        qk_nope_head_dim=moments.head_dim,
        v_head_dim=moments.head_dim,
        attention_bias=any(b is not None for h in heads for b in (h.q_bias, h.k_bias, h.o_bias)),
        # the fastest frequencies: a geometric row of the same ratio
        rope_parameters={
            **own.rope_parameters,
            "rope_theta": theta ** (fit.rope_dim / moments.head_dim),
        },
    )


def _attention_weights(
    attention: Attention, fit: Fit, config: DeepseekV3Config, norm: float
) -> dict[str, Tensor]:
    """Return the tensors of one layer's attention; ``norm`` bounds the norm before it."""
    heads, latent = read_heads(attention), fit.latents[attention.path]
    owners, hidden = heads.owners, config.hidden_size
    q, k, v = (_with_bias(heads.affine(role).double(), hidden) for role in ("q", "k", "v"))
    small, weight, factor = _linear_norm(latent.mean_square)
    both = torch.cat([k.flatten(0, 1), v.flatten(0, 1)])
    turned = torch.arange(config.qk_rope_head_dim).view(2, -1).T.flatten()  # pairs, as DeepSeek
    latents = latent.down @ both
    latents[:, -1] += latent.offset
    down = torch.cat([latents * small, latent.rotary_down[turned] @ k.flatten(0, 1)])
    keys, values = (latent.up * factor).unflatten(0, (2, len(heads.k), -1))
    rotary_up = latent.rotary_up[:, turned].unflatten(0, (len(heads.k), -1))[owners]
    scale = attention.module.scaling * config.qk_head_dim**0.5 * fit.sharpness
    queries = scale * torch.cat([q, rotary_up.mT @ q], 1).flatten(0, 1)
    tensors = {
        "kv_a_proj_with_mqa.weight": down[:, :-1],
        "kv_a_layernorm.weight": torch.full((config.kv_lora_rank,), weight),
        "kv_b_proj.weight": torch.cat([keys[owners], values[owners]], 1).flatten(0, 1),
        "o_proj.weight": heads.o.permute(1, 0, 2).flatten(1),
    }
    if config.attention_bias:
        tensors["kv_a_proj_with_mqa.bias"] = down[:, -1]
        o_bias = torch.zeros(hidden) if heads.o_bias is None else heads.o_bias
        tensors["o_proj.bias"] = o_bias
    if config.q_lora_rank is None:
        return tensors | {"q_proj.weight": queries[:, :-1]}
    small, weight, factor = _linear_norm(norm**2)
    one = torch.zeros(hidden + 1)
    one[-1] = small
    return tensors | {
        "q_a_proj.weight": small * torch.eye(hidden + 1, hidden),
        "q_a_proj.bias": one,
        "q_a_layernorm.weight": torch.full((hidden + 1,), weight),
        "q_b_proj.weight": queries * factor,
    }


def _with_bias(weight: Tensor, hidden: int) -> Tensor:
    """Return a map of the input with a 1 at its end, of one with or without a bias."""
    return nn.functional.pad(weight, (0, hidden + 1 - weight.shape[-1]))


def _linear_norm(mean_square: float) -> tuple[float, float, float]:
    """Return the factor before a norm, its weight, and the factor after it.

    The first two are numbers of bfloat16, and the last makes up for their rounding.
    """
    small = _rounded((_SMALL * _EPS / max(mean_square, 1e-20)) ** 0.5)
    weight = _rounded(_EPS**0.5 / small)
    return small, weight, _EPS**0.5 / (weight * small)


def _rounded(number: float) -> float:
    return float(torch.tensor(number).bfloat16())
