"""`foreshard models`: the models that are known, or one of them in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from foreshard import quantity
from foreshard.cli.options.answer import answering, give
from foreshard.cli.options.sources import configurable
from foreshard.report.screen import Screen, table

if TYPE_CHECKING:
    from foreshard.spec.model import Model


@click.command("models")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List every known model, or show the one that NAME (a catalog name or a config.json) means."""
    from foreshard import api
    from foreshard.catalog.models import models

    found = [api.load_model(name)] if name else list(models().values())
    data = {"schema_version": 1, "models": [model_dict(model) for model in found]}
    give(data, lambda: _detail(found[0]) if name else _list(found))


def model_dict(model: Model) -> dict[str, Any]:
    """Return a model's sizes and counts as its JSON object."""
    return {
        "name": model.name,
        "kind": model.kind,
        "num_layers": model.num_layers,
        "hidden": model.hidden,
        "vocab": model.vocab,
        "max_seq_len": model.max_seq_len,
        "tied_embeddings": model.tied_embeddings,
        "num_params": model.num_params,
        "active_params": model.active_params,
        "trainable_params": model.trainable_params,
        "num_experts": max(block.num_experts for block in model.blocks),
        "flops_per_token": model.flops_per_token(model.max_seq_len, False),
        "source": model.source,
        "assumptions": list(model.assumptions),
    }


def _list(found: list[Model]) -> Screen:
    rows = [
        (
            one.name,
            quantity.count(one.num_params),
            quantity.count(one.active_params) if one.active_params != one.num_params else "",
            one.num_layers,
            one.hidden,
            one.max_seq_len,
            one.kind,
        )
        for one in found
    ]
    columns = ("model", ">params", ">active", ">layers", ">hidden", ">seq", "kind")
    title = f"{len(found)} models; any HF config.json works as well. 'foreshard models NAME' shows one."
    return Screen(tables=(table(title, columns, rows, spare=("kind", ">hidden")),))


def _detail(model: Model) -> Screen:
    facts = [
        ("kind", model.kind),
        ("parameters", f"{model.num_params:,}"),
        ("active per token", f"{model.active_params:,}"),
        ("layers, hidden, vocab", f"{model.num_layers}, {model.hidden}, {model.vocab}"),
        ("sequence", model.max_seq_len),
        ("tied embeddings", "yes" if model.tied_embeddings else "no"),
        ("training FLOPs per token", quantity.count(model.flops_per_token(model.max_seq_len, False))),
        ("source", model.source or None),
        *(("assumed", text) for text in model.assumptions),
    ]
    rows = []
    for block, count in model.block_kinds():
        experts = (
            f"{block.num_experts} x {block.expert_ffn}, top {block.top_k}" if block.num_experts else None
        )
        heads = f"{block.num_heads}/{block.num_kv_heads} x {block.head_dim}"
        rows.append(
            (count, heads, block.ffn or None, experts, block.window or None, quantity.count(block.num_params))
        )
    columns = (">blocks", "heads/kv x dim", ">ffn", "experts", ">window", ">params each")
    return Screen(header=(model.name,), tables=(table("", ("", ""), facts), table("Blocks", columns, rows)))


command = configurable(answering(command))
