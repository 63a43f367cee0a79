"""Spearman's rank correlation of similarities with gold scores, as for STS-B."""

import datasets
import evaluate
import numpy as np

from headprune.evaluation.comparison import rank_correlation


class SimilaritySpearman(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    def _info(self) -> evaluate.MetricInfo:
        features = {
            "similarities": datasets.Value("float64"),
            "scores": datasets.Value("float64"),
        }
        return evaluate.MetricInfo(
            description="Pearson's correlation of the ranks; ties get their mean rank. "
            "Higher is better.",
            citation="",
            inputs_description="Args: similarities of sentence pairs, and their gold scores",
            features=datasets.Features(features),
        )

    def _compute(self, similarities: list[float], scores: list[float]) -> dict[str, float]:
        return {"spearman": rank_correlation(np.asarray(similarities), np.asarray(scores))}
