"""Share of examples whose predicted label is the true one."""

import datasets
import evaluate


class LabelAccuracy(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description="Share of predictions that equal the reference. Higher is better.",
            citation="",
            inputs_description="Args: predictions, references: label ids",
            features=datasets.Features(features),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        hits = sum(p == r for p, r in zip(predictions, references, strict=True))
        return {"accuracy": hits / len(references)}
