"""Labelled images, from folders, tables and data sets in memory."""

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from PIL import Image as Pictures
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import headprune
from headprune.config import DataConfig
from headprune.data.images import image_rows, pixels_of, read_images
from headprune.errors import DataError, HeadpruneError
from headprune.model.attention import attention_of
from tests import tiny

CLASSES = ("dark", "light")
PROCESSOR = ViTImageProcessorPil(size={"height": 8, "width": 8})


def picture(number):
    """Dark ones of even numbers, light ones of odd."""
    noise = np.random.default_rng(number).integers(0, 100, (8, 8), np.uint8)
    return Pictures.fromarray(noise + 150 * (number % 2))


@pytest.fixture
def images(tmp_path):
    """A folder with a subfolder of 20 images per class."""
    for number in range(40):
        place = tmp_path / "images" / CLASSES[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        picture(number).save(place / f"{number}.png")
    return tmp_path / "images"


@pytest.fixture
def model(tmp_path):
    """A model that tells dark from light."""
    torch.manual_seed(0)
    net = ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
            id2label=dict(enumerate(CLASSES)),
            label2id={name: number for number, name in enumerate(CLASSES)},
        )
    )
    pictures = [picture(number).convert("RGB") for number in range(40)]
    pixels = PROCESSOR(images=pictures, return_tensors="pt")["pixel_values"]
    optimizer, labels = torch.optim.AdamW(net.parameters(), 3e-3), torch.arange(40) % 2
    for _ in range(30):
        optimizer.zero_grad()
        net(pixel_values=pixels, labels=labels).loss.backward()
        optimizer.step()
    PROCESSOR.save_pretrained(tiny.save(net.eval(), tmp_path / "model"))
    return tmp_path / "model"


def heads(net):
    return sum(attention.query_heads for attention in attention_of(net))


def accuracy(report, side="model"):
    (value,) = (m.value for m in getattr(report, side).metrics if m.name == "accuracy")
    return float(value)


def test_a_model_of_images_is_scored_refitted_and_measured(model, images, tmp_path):
    how = {"calibration_tokens": 100}
    scores = headprune.score(model, tmp_path / "scores", data=images, **how)
    assert scores.metadata.tokens == 4 * 25  # patches of 25 images
    out = tmp_path / "out"
    result = headprune.prune(model, out, scores=tmp_path / "scores", keep=0.5, layout="ragged")
    assert heads(result.model) == 4 and result.manifest.refit is not None
    report = headprune.evaluate(out, data=images, against=model)
    assert accuracy(report, "against") == 1 and report.model.speed is None
    with torch.no_grad():
        net, right = result.model, 0
        for number in range(40):
            pixels = PROCESSOR(images=[picture(number).convert("RGB")], return_tensors="pt")
            right += int(net(**pixels).logits.argmax(-1)) == number % 2
    assert accuracy(report) == right / 40
    (images / "dark").rename(images / "other")  # the same place: no cache may hold it
    (images / "light").rename(images / "dark")
    (images / "other").rename(images / "light")
    assert accuracy(headprune.evaluate(model, data=images)) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gates_and_healing_learn_from_images(dtype, model, images, tmp_path):
    small = {"data": images, "steps": 4, "batch_size": 8}
    run = headprune.train_gates(model, tmp_path / "scored", target_heads=2, dtype=dtype, **small)
    assert run.metadata.refitted and run.metadata.judgement is not None
    assert heads(headprune.prune(model, tmp_path / "fit", gates=tmp_path / "scored").model) == 2
    # W_O refitted leaves too little to heal
    headprune.train_gates(
        model, tmp_path / "gates", target_heads=2, dtype=dtype, train="attention", **small
    )
    cut = headprune.prune(model, tmp_path / "cut", gates=tmp_path / "gates")
    assert heads(cut.model) == 2
    healed = tiny.healed(tmp_path / "cut", model, tmp_path / "healed", images)
    assert healed.taken_after > 0 and heads(healed.model) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_encoder_of_images_is_compared_by_its_embeddings(dtype, model, images, tmp_path):
    folder = tmp_path / "encoder"
    net = headprune.from_pretrained(model).vit
    for attention in attention_of(net):  # a loss of heads is to be seen
        attention.output_projection.weight.data.mul_(20)
    tiny.save(net, folder)
    PROCESSOR.save_pretrained(folder)
    how = {"data": images, "dtype": dtype, "calibration_tokens": 300}
    headprune.score(folder, tmp_path / "scores", criterion=["compensated", "gradient"], **how)
    cut = {"keep": 0.5, "layout": "ragged", "criterion": "gradient", "refit": "none"}
    headprune.prune(folder, tmp_path / "out", scores=tmp_path / "scores", **cut)
    likeness = []
    for out in (folder, tmp_path / "out"):
        report = headprune.evaluate(out, data=images, against=folder)
        found = {one.name: one.value for one in report.model.metrics}
        likeness.append((found["mean_cosine"], found["similarity_correlation"]))
    assert likeness[0] == pytest.approx((1, 1)) and likeness[1] < (0.999, 1)
    with pytest.raises(DataError, match="measured against its base"):
        headprune.evaluate(folder, data=images)


@pytest.mark.parametrize("kind", ["folder", "parquet", "memory"])
def test_images_are_the_same_from_everywhere(kind, images, tmp_path):
    folder = read_images(DataConfig(source=str(images)))
    numbers = [n for first in range(2) for n in range(first, 40, 2)]
    rows = {"image": [picture(n) for n in numbers], "label": [CLASSES[n % 2] for n in numbers]}
    table = Dataset.from_dict(rows, Features({"image": Image(), "label": Value("string")}))
    source = images
    if kind == "parquet":
        table.to_parquet(source := tmp_path / "images.parquet")
    data = DataConfig(source=str(source), label_column=None if kind == "folder" else "label")
    if kind == "memory":
        table.save_to_disk(tmp_path / "saved")
        data = data.model_copy(update={"source": str(tmp_path / "saved")})
    read = read_images(data)
    net = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_hidden_layers=1))
    pixels = [
        pixels_of(each, PROCESSOR)(list(image_rows(each, net, None)))["pixel_values"]
        for each in (folder, read)
    ]
    of_labels = [
        sorted(zip(each.labels or (), values.flatten(1).sum(1).tolist(), strict=True))
        for each, values in zip((folder, read), pixels, strict=True)
    ]
    assert of_labels[0] == of_labels[1] and len(of_labels[0]) == 40
    assert len({value for _, value in of_labels[0]}) == 40


def test_hidden_files_are_no_images(model, images):
    before = read_images(DataConfig(source=str(images)))
    for place in (images / ".ipynb_checkpoints", images / "dark" / ".git", images / "__MACOSX"):
        place.mkdir()
        picture(1).save(place / "1.png")
        picture(1).save(place.parent / "._1.png")
    (images / "Thumbs.db").write_bytes(b"\xd0\xcf")
    assert read_images(DataConfig(source=str(images))).sha256 == before.sha256
    assert accuracy(headprune.evaluate(model, data=images)) == 1
    picture(1).save(images / "dark" / "1.png")
    assert accuracy(headprune.evaluate(model, data=images)) == 40 / 41


def test_a_list_of_images_has_the_labels_as_written(images):
    files, labels = sorted(images.rglob("*.png")), ["NA", "007", "1.0", "None", "x"] * 8
    rows = [
        f"{file.relative_to(images)},{label}" for file, label in zip(files, labels, strict=True)
    ]
    (images / "metadata.csv").write_text("\n".join(["file_name,kind", *rows]))
    assert read_images(DataConfig(source=str(images), label_column="kind")).labels == labels
    (images / "metadata.csv").write_text("file_name,kind\ndark/0.png,\n")
    with pytest.raises(DataError, match="--label-column kind: a row has no label"):
        assert read_images(DataConfig(source=str(images), label_column="kind")).labels


def test_a_data_set_in_memory_is_measured(model):
    rows = {"image": [picture(n) for n in range(12)], "label": [CLASSES[n % 2] for n in range(12)]}
    table = Dataset.from_dict(rows, Features({"image": Image(), "label": Value("string")}))
    report = headprune.evaluate(model, data=table, label_column="label")
    assert accuracy(report) == 1 and report.model.metrics[0].n == 12


def test_what_are_no_labelled_images_is_said(model, images, tmp_path):
    def refused(why, **data):
        with pytest.raises(HeadpruneError, match=why) as caught:
            headprune.evaluate(model, **data)
        assert "\n" not in str(caught.value)

    (tmp_path / "text.txt").write_text("w1 w2")
    refused("holds no images", data=tmp_path / "text.txt")
    (tmp_path / "empty").mkdir()
    refused("holds no images", data=tmp_path / "empty")
    refused("Images are in image: name one with --text-column", data=images, text_column="label")
    refused("--label-column no: .* has the columns image, label", data=images, label_column="no")
    (images / "dark" / "0.png").write_bytes(b"no picture")
    refused("An image of rows .* cannot be read", data=images)
    (images / "dark").rename(images / "grey")
    refused("The label 'grey' is none of the model's labels", data=images)
    (model / "preprocessor_config.json").unlink()
    refused("has no usable preprocessor_config.json", data=images)
    with pytest.raises(HeadpruneError, match="and compress reads text"):
        headprune.compress(model, tmp_path / "out", data=images, keep=0.5)
