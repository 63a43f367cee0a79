"""How far embeddings of one model stand for those of another."""

import datasets
import evaluate
import numpy as np


class EmbeddingFidelity(evaluate.Metric):  # type: ignore[misc]
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
        upper = np.triu_indices(len(a), k=1)
        correlation = np.corrcoef((a @ a.T)[upper], (b @ b.T)[upper])[0, 1]
        return {
            "mean_cosine": float((a * b).sum(axis=1).mean()),
            "similarity_correlation": float(correlation),
        }
