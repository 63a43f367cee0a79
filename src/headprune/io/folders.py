"""Files that results take over from the folder of their model, and hashes of files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from huggingface_hub import snapshot_download

from headprune.errors import CheckpointError
from headprune.io import hub
from headprune.io.writing import is_there

OF_SENTENCES = (  # with pooling and dense layers
    *("modules.json", "sentence_*config.json", "config_sentence_transformers.json"),
    *("[0-9]*_*/config.json", "[0-9]*_*/*.safetensors"),
)
# Files of tokenizers, processors and generation, with code (never run); adapters of languages;
# licences. Weights and config are written anew; other files are the user's.
COMPANIONS = (
    *("tokenizer*", "*vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "*.tiktoken", "*.jinja", "*processor*.json", "preprocessor_config.json"),
    *("tekken.json", "bpe.codes", "byte_maps.json", "emoji.json", "word_*.json", "*.tokenizer"),
    *("chat_template.json", "additional_chat_templates/*.jinja", "audio_tokenizer_config.json"),
    *("tokenization_*.py", "*processing_*.py", "feature_extraction_*.py"),
    *("custom_generate/*", "generation_config.json", "adapter.*.safetensors"),
    *("*LICEN[CS]E*", "*[Ll]icen[cs]e*", "*NOTICE*", "*[Nn]otice*", "*USE_POLICY*", "COPYING*"),
    *OF_SENTENCES,
    *("spm*.json", "source.spm", "target.spm", "normalizer.json", "dict.txt"),
)


_AT_ONCE = 4  # files to hash at once: more wait for the disk


def source_folder(model: str | Path) -> Path:
    """Return the folder of a model; settings and companions of one of the hub are brought there."""
    if Path(model).is_dir():
        return Path(model)
    with hub.asked_once(model):
        patterns = ["*.json", "README.md", *COMPANIONS]
        return Path(snapshot_download(str(model), allow_patterns=patterns))


def refuse_links(folder: str | Path) -> None:
    """Refuse a model folder with a link to something else: its content would become the model's.

    A link may lead to a place in the folder. Not to .git: the address of a clone may hold a
    password. In the cache of the hub, it may also lead to the blobs of the same repository.

    Raises:
        CheckpointError: Naming the first such link.
    """
    if not Path(folder).is_dir():
        return
    root = Path(os.path.realpath(folder))
    blobs = [
        snapshots.with_name("blobs")
        for snapshots in root.parents
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--")
    ]
    within = (Path(at, name) for at, *both in os.walk(root) for name in sorted(chain(*both)))
    for link in filter(Path.is_symlink, within):
        target = Path(os.path.realpath(link))
        ours = target.is_relative_to(root) and ".git" not in target.relative_to(root).parts
        if not (is_there(target) and (ours or target.parent in blobs)):
            raise CheckpointError(
                f"'{link.relative_to(root)}' in '{folder}' is a link to '{target}', and not to a "
                "file of that folder. Put the file itself in its place if you trust it, or remove "
                "the link."
            )


def copy_companions(source: Path, target: Path, patterns: Iterable[str] = COMPANIONS) -> None:
    """Copy tokenizer and processor files, settings of generation and pooling, licences.

    Raises:
        CheckpointError: If the source holds a link to something else.
    """
    refuse_links(source)
    files = {file for pattern in patterns for file in source.glob(pattern) if file.is_file()}
    for file in sorted(files):
        inside = file.relative_to(source)
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / inside)


def sha256_of(file: Path, stop: threading.Event | None = None) -> str:
    """Return the SHA-256 of a file, or of the part read until ``stop`` was set."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while (block := stream.read(1 << 20)) and not (stop is not None and stop.is_set()):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def hashing(folder: Path, names: Iterable[str]) -> Iterator[Callable[[], dict[str, str]]]:
    """Hash finished files of a folder in threads while a ``with`` block runs.

    Args:
        folder: The folder.
        names: Names of the files in it.

    Yields:
        A function that waits for the hashes, and returns them by name.
    """
    stop = threading.Event()
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        digests = {name: pool.submit(sha256_of, folder / name, stop) for name in names}
        yield lambda: {name: digest.result() for name, digest in digests.items()}
    finally:  # Ctrl-C does not wait for half-read files
        stop.set()
        pool.shutdown(cancel_futures=True)


def hashes_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of files of a folder by name."""
    with hashing(folder, names) as hashes:
        return hashes()


def digest_of(content: object) -> str:
    """Return the SHA-256 of JSON content, whatever the order of names."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
