"""Query heads cut by torch-pruning's own package, as its example for language models calls it.

    pip install torch==2.13.0 torch-pruning==1.6.1 transformers==4.55.4 typer
    python scripts/cut_by_torch_pruning.py MODEL CALIBRATION OUT --importance taylor

In an environment of its own: with the attention masks of transformers 5 its grouping did not end.
Needs nothing of headprune; the result is a plain checkpoint, for bench_folders.py. Of every KV
group it removes the same number of heads, rounded up. ``--widths`` shrinks everything else by the
same share as well, which is what the example does.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import torch_pruning
import typer
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

TOKENS, WINDOW = 16_384, 512
IMPORTANCE = torch_pruning.importance
KINDS = {
    "magnitude": lambda: IMPORTANCE.GroupMagnitudeImportance(p=2, group_reduction="mean"),
    "taylor": lambda: IMPORTANCE.GroupTaylorImportance(group_reduction="mean"),
}


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model of the Llama kind.")],
    data: Annotated[Path, typer.Argument(help="Text that Taylor's gradients are taken on.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    importance: Annotated[str, typer.Option(help="magnitude or taylor.")] = "taylor",
    remove: Annotated[float, typer.Option(help="Share of the heads.")] = 0.25,
    widths: Annotated[bool, typer.Option(help="Shrink the other widths too.")] = False,
) -> None:
    """Group, weigh, cut, write."""
    net: Any = AutoModelForCausalLM.from_pretrained(
        model, torch_dtype=torch.float32, attn_implementation="eager"
    ).eval()
    heads: dict[nn.Module, int] = {}
    ignored: list[nn.Module] = [net.lm_head]
    for layer in net.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        heads[attention.q_proj] = net.config.num_attention_heads
        heads[attention.k_proj] = heads[attention.v_proj] = net.config.num_key_value_heads
        if not widths:
            ignored += [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if not widths:
        ignored.append(net.model.embed_tokens)
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(data.read_text()).ids
    windows = torch.tensor(tokens[:TOKENS]).view(-1, 1, WINDOW)
    pruner = torch_pruning.pruner.BasePruner(
        net,
        example_inputs=windows[0, :, :8],
        importance=KINDS[importance](),
        output_transform=lambda out: out.logits,
        pruning_ratio=remove,
        head_pruning_ratio=remove,
        prune_num_heads=True,
        prune_head_dims=False,  # heads stay as wide as the rotary embedding makes them
        num_heads=heads,
        ignored_layers=ignored,
        round_to=4,
    )
    if importance == "taylor":
        for window in windows:
            net(window, labels=window).loss.backward()
    for group in pruner.step(interactive=True):
        group.prune()
    _write(net, model, output)


def _write(net: Any, model: Path, output: Path) -> None:
    """Writes what is left as the model of a config that says so."""
    layer, head_dim = net.model.layers[0], net.model.layers[0].self_attn.head_dim
    config = copy.deepcopy(net.config)
    config.head_dim = head_dim
    config.num_attention_heads = layer.self_attn.q_proj.out_features // head_dim
    config.num_key_value_heads = layer.self_attn.k_proj.out_features // head_dim
    config.hidden_size = layer.self_attn.q_proj.in_features
    config.intermediate_size = layer.mlp.gate_proj.out_features
    plain = type(net)(config)
    plain.load_state_dict(net.state_dict())
    plain.save_pretrained(output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, output)
    print(config.num_attention_heads, "query heads,", config.hidden_size, "wide")


if __name__ == "__main__":
    typer.run(main)
