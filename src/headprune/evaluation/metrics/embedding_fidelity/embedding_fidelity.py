"""How far embeddings of one model stand for those of another."""

import math

import datasets
import evaluate
import numpy as np

_ROUNDING = 1e-12  # variance that rounding in float32 leaves where all similarities are the same


class EmbeddingFidelity(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    def _info(self) -> evaluate.MetricInfo:
        vector = datasets.Sequence(datasets.Value("float64"))
        return evaluate.MetricInfo(
            description="Mean cosine of the two embeddings of a text, and Pearson's correlation of "
            "all pairwise similarities within each model. Higher is better.",
            citation="",
            inputs_description="Args: predictions, references: normalised embeddings of the same "
            "texts by the model and by its base",
            features=datasets.Features({"predictions": vector, "references": vector}),
        )

    def _compute(
        self, predictions: list[list[float]], references: list[list[float]]
    ) -> dict[str, float]:
        a, b = np.asarray(predictions), np.asarray(references)
        variances = _covariance(a, a), _covariance(b, b)
        correlation = float("nan")
        if min(variances) > _ROUNDING:
            correlation = _covariance(a, b) / math.sqrt(variances[0] * variances[1])
        return {
            "mean_cosine": float((a * b).sum(axis=1).mean()),
            "similarity_correlation": correlation,
        }


def _covariance(a: np.ndarray, b: np.ndarray) -> float:
    """Covariance of a_i.a_j with b_i.b_j over all pairs i < j.

    The sum of their products over all i and j is |A^T B|^2, so that no matrix of texts x texts is
    ever made. Shapes (texts, hidden).
    """
    n = len(a)
    if n < 2:
        return 0.0
    of_a, of_b = (a * a).sum(1), (b * b).sum(1)
    pairs = n * (n - 1) / 2
    products = (((a.T @ b) ** 2).sum() - of_a @ of_b) / 2
    sums = [((m.sum(0) ** 2).sum() - squares.sum()) / 2 for m, squares in ((a, of_a), (b, of_b))]
    return float(products / pairs - sums[0] * sums[1] / pairs**2)
