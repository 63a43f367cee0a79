"""What harms the files of a model, gates or scores."""

import json

from safetensors.torch import load_file, save_file

import headprune


def edit(file, change):
    """Changes what a file of JSON or tensors holds: the change is called with it, and alters it."""
    if file.suffix == ".json":
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
    else:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"} if file.name == "model.safetensors" else None)


def of(name, change):
    """The same as a function of the folder that the file lies in."""
    return lambda folder: edit(folder / name, change)


def flip(file):
    """Changes the last bit of a file: of safetensors, one of a weight."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def in_shards(folder):
    """Writes the weights of a model in shards; their index."""
    headprune.from_pretrained(folder).save_pretrained(folder, max_shard_size="50KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return folder / "model.safetensors.index.json"
