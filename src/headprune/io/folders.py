"""What results take over from the folder of their model, and what files are known by."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

# Of a model folder, what a result takes over as it is: what belongs to tokenizers and processors,
# code of theirs and of generation, which is not run, adapters of languages, and licences.
# Weights and config are written anew; whatever else lies there is the user's own.
COMPANIONS = (
    *("tokenizer*", "*vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "*.tiktoken", "*.jinja", "*processor*.json", "preprocessor_config.json"),
    *("tekken.json", "bpe.codes", "byte_maps.json", "emoji.json", "word_*.json", "*.tokenizer"),
    *("chat_template.json", "additional_chat_templates/*.jinja", "audio_tokenizer_config.json"),
    *("tokenization_*.py", "*processing_*.py", "feature_extraction_*.py"),
    *("custom_generate/*", "generation_config.json", "adapter.*.safetensors"),
    *("*LICEN[CS]E*", "*[Ll]icen[cs]e*", "*NOTICE*", "*[Nn]otice*", "*USE_POLICY*", "COPYING*"),
    *("modules.json", "sentence_*config.json", "config_sentence_transformers.json"),
    *("[0-9]*_*/config.json", "[0-9]*_*/*.safetensors"),  # pooling and dense layers
    *("spm*.json", "source.spm", "target.spm", "normalizer.json", "dict.txt"),
)


_AT_ONCE = 4  # files that are hashed: more wait for the disk


def copy_companions(source: Path, target: Path) -> None:
    """Copies tokenizer and processor files, settings of generation and pooling, licences."""
    files = {file for pattern in COMPANIONS for file in source.glob(pattern) if file.is_file()}
    for file in sorted(files):
        inside = file.relative_to(source)
        (target / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / inside)


def sha256_of(file: Path, stop: threading.Event | None = None) -> str:
    """The SHA-256 of a file; of what was read of it until ``stop`` was set, where that is given."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while (block := stream.read(1 << 20)) and not (stop is not None and stop.is_set()):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def hashing(folder: Path, names: Iterable[str]) -> Iterator[Callable[[], dict[str, str]]]:
    """Hashes files of a folder beside what the block does, several at once.

    Args:
        folder: The folder.
        names: The files, by their names in it; nothing may change them any more.

    Yields:
        Waits for the SHA-256 of each, by name. What is not waited for ends with the block.
    """
    stop = threading.Event()
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        found = {name: pool.submit(sha256_of, folder / name, stop) for name in names}
        yield lambda: {name: digest.result() for name, digest in found.items()}
    finally:  # Ctrl-C as well does not wait for what is half read
        stop.set()
        pool.shutdown(cancel_futures=True)


def hashes_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files of a folder, by their names in it."""
    with hashing(folder, names) as hashes:
        return hashes()


def digest_of(content: object) -> str:
    """The SHA-256 of what JSON can hold; the order of names does not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
