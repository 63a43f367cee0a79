"""Heads against accuracy of a small vision transformer, by commands alone.

    python scripts/bench_digits.py FOLDER [--seeds 3]

The images are the 1,797 handwritten digits that scikit-learn ships (UCI, 8 x 8); 400 of them judge.
Every seed trains another model, and prints a row per method and share of heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from PIL import Image
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import headprune

_EPOCHS, _BATCH, _SIDE = 40, 64, 16


def write_images(folder: Path) -> None:
    """Write the digits as folders of images: train and test."""
    digits = load_digits()
    judging = set(np.random.default_rng(0).permutation(len(digits.images))[:400].tolist())
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / ("test" if number in judging else "train") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        grey = Image.fromarray((image * 15.9).astype(np.uint8))
        grey.resize((_SIDE, _SIDE), Image.Resampling.NEAREST).save(place / f"{number}.png")


def train(folder: Path, seed: int) -> Path:
    """Train a model of 4 layers of 8 heads; return its folder."""
    processor = ViTImageProcessorPil(size={"height": _SIDE, "width": _SIDE})
    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=128,
        image_size=_SIDE,
        patch_size=4,
        id2label={number: str(number) for number in range(10)},
        label2id={str(number): number for number in range(10)},
    )
    net = ViTForImageClassification(config)
    files = sorted((folder / "train").rglob("*.png"))
    pictures = [Image.open(file).convert("RGB") for file in files]
    pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
    labels = torch.tensor([int(file.parent.name) for file in files])
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.05)
    total = _EPOCHS * -(-len(files) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=total)
    for _ in range(_EPOCHS):
        for rows in torch.randperm(len(files)).split(_BATCH):
            optimizer.zero_grad()
            net(pixel_values=pixels[rows], labels=labels[rows]).loss.backward()
            optimizer.step()
            schedule.step()
    output = folder / f"model{seed}"
    net.save_pretrained(output)
    processor.save_pretrained(output)
    return output


def accuracy(model: Path, test: Path) -> float:
    """Return the share of test images whose digit is named."""
    report = headprune.evaluate(model, data=test, speed=False)
    return next(one.value for one in report.model.metrics if one.name == "accuracy")


def main(folder: Path, seeds: int = 3) -> None:
    """Train, cut and judge."""
    if not folder.exists():
        write_images(folder)
    data, test = folder / "train", folder / "test"
    for seed in range(seeds):
        model = train(folder, seed)
        print(f"| {seed} | whole | 1 | {accuracy(model, test):.4f} |", flush=True)
        for criterion in ("compensated", "random"):
            scores = folder / f"{criterion}{seed}"
            headprune.score(model, scores, criterion=criterion, unit="head", data=data, seed=seed)
        for keep in (0.75, 0.5, 0.25):
            cuts = {name: folder / f"{name}{keep}-{seed}" for name in ("comp", "rand", "gate")}
            how: dict[str, Any] = {"keep": keep, "layout": "ragged"}
            headprune.prune(model, cuts["comp"], scores=folder / f"compensated{seed}", **how)
            headprune.prune(model, cuts["rand"], scores=folder / f"random{seed}", **how)
            gates = folder / f"gates{keep}-{seed}"
            sizes: dict[str, Any] = {"steps": 200, "batch_size": 32, "seed": seed}
            headprune.train_gates(model, gates, data=data, target_heads=keep, **sizes)
            headprune.prune(model, cuts["gate"], gates=gates)
            for name, cut in cuts.items():
                print(f"| {seed} | {name} | {keep} | {accuracy(cut, test):.4f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
