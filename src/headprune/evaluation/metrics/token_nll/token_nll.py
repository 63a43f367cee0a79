"""Perplexity and bits per byte from summed token losses."""

import math

import datasets
import evaluate

_DESCRIPTION = """Perplexity exp(sum nll / sum tokens), and bits per byte
sum nll / (ln 2 sum bytes), which compares models with different tokenizers. Lower is better."""

_INPUTS = """
Args:
    nll_nats: summed negative log-likelihood of each window, in nats
    tokens: scored tokens of each window
    utf8_bytes: bytes of the text of these tokens
"""


class TokenNll(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    def _info(self) -> evaluate.MetricInfo:
        features = {
            "nll_nats": datasets.Value("float64"),
            "tokens": datasets.Value("int64"),
            "utf8_bytes": datasets.Value("int64"),
        }
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(features),
        )

    def _compute(
        self, nll_nats: list[float], tokens: list[int], utf8_bytes: list[int]
    ) -> dict[str, float]:
        total = math.fsum(nll_nats)
        mean = total / sum(tokens) if sum(tokens) else math.nan
        bits, utf8 = total / math.log(2), sum(utf8_bytes)
        return {
            "nll_nats_per_token": mean,
            "perplexity": math.exp(mean) if mean < 709 else math.inf,  # the most that a float holds
            "bits_per_byte": bits / utf8 if utf8 else math.nan,
        }
