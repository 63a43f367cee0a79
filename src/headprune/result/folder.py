"""A written model, for Python users."""

from __future__ import annotations

import shutil
from html import escape
from pathlib import Path
from typing import Any

from headprune.io.folders import refuse_links


class ModelFolder:
    """A result that is a folder, or has one as ``pruned``."""

    @property
    def _written(self) -> Any:
        return getattr(self, "pruned", self)

    @property
    def model(self) -> Any:
        """The model, loaded anew."""
        from headprune.model.loading import from_pretrained

        return from_pretrained(self._written.output)

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        from headprune.model.loading import load_tokenizer

        return load_tokenizer(self._written.output)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Copy the whole folder; model, tokenizer, record and card."""
        refuse_links(self._written.output)
        return Path(shutil.copytree(self._written.output, folder))

    def push_to_hub(self, repo_id: str, private: bool | None = None, **options: Any) -> str:
        """Upload the folder to a repository of the hub, created if need be.

        ``options`` are those of ``huggingface_hub.HfApi.upload_folder``. Returns its address.
        """
        from huggingface_hub import HfApi

        refuse_links(self._written.output)
        api = HfApi(token=options.pop("token", None))
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=self._written.output, **options))

    def _repr_html_(self) -> str:
        manifest = self._written.manifest
        heads, kv_heads = manifest.query_heads, manifest.kv_heads
        rows = {
            "folder": str(self._written.output),
            "query heads": f"{heads[0]:,} to {heads[1]:,}",
            "KV heads": f"{kv_heads[0]:,} to {kv_heads[1]:,}",
            "parameters": f"{manifest.parameters[0]:,} to {manifest.parameters[1]:,}",
        }
        cells = "".join(f"<tr><th>{name}</th><td>{escape(v)}</td></tr>" for name, v in rows.items())
        return f"<table>{cells}</table>"
