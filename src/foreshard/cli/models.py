"""`foreshard models`: the models that are known, or one of them in full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from foreshard import quantity
from foreshard.cli.options.answer import give
from foreshard.cli.options.sources import verb_command
from foreshard.report.screen import Screen, listing, table
from foreshard.spec.model import Block, Model


@verb_command("models")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List models and networks, or show the model that NAME (a catalog name or a config.json) means."""
    from foreshard import api
    from foreshard.catalog.models import models
    from foreshard.profile.networks.catalog import NETWORKS, sample_of

    found = [api.load_model(name)] if name else list(models().values())
    networks = [] if name else [(network, sample_of(network)) for network in NETWORKS]
    data = {"schema_version": 1, "models": [model_dict(model) for model in found]}
    data |= (
        {"networks": [{"name": network, "sample": sample} for network, sample in networks]}
        if networks
        else {}
    )
    give(data, lambda: _detail(found[0]) if name else _list(found, networks))


_SIZES = (
    "name",
    "kind",
    "num_layers",
    "hidden",
    "vocab",
    "max_seq_len",
    "tied_embeddings",
    "num_params",
    "active_params",
    "trainable_params",
    "source",
)


def model_dict(model: Model) -> dict[str, Any]:
    """Return a model's sizes and counts as its JSON object."""
    return {name: getattr(model, name) for name in _SIZES} | {
        "num_experts": max(block.num_experts for block in model.blocks),
        "flops_per_token": model.flops_per_token(model.max_seq_len, False),
        "assumptions": list(model.assumptions),
    }


_COLUMNS: dict[str, Callable[[Model], object]] = {
    "model": lambda model: model.name,
    ">params": lambda model: quantity.count(model.num_params),
    ">active": lambda model: (
        quantity.count(model.active_params) if model.active_params != model.num_params else ""
    ),
    ">layers": lambda model: model.num_layers,
    ">hidden": lambda model: model.hidden,
    ">seq": lambda model: model.max_seq_len,
    "kind": lambda model: model.kind,
}
_BLOCKS: dict[str, Callable[[tuple[Block, int]], object]] = {
    ">blocks": lambda kind: kind[1],
    "heads/kv x dim": lambda kind: f"{kind[0].num_heads}/{kind[0].num_kv_heads} x {kind[0].head_dim}",
    ">ffn": lambda kind: kind[0].ffn or None,
    "experts": lambda kind: _experts(kind[0]),
    ">window": lambda kind: kind[0].window or None,
    ">params each": lambda kind: quantity.count(kind[0].num_params),
}


def _experts(block: Block) -> str | None:
    return f"{block.num_experts} x {block.expert_ffn}, top {block.top_k}" if block.num_experts else None


def _list(found: list[Model], networks: list[tuple[str, str]]) -> Screen:
    title = f"{len(found)} models; any HF config.json works as well. 'foreshard models NAME' shows one."
    traced = f"{len(networks)} networks, traced by predict, plan and export; module.py:factory works as well."
    models = listing(title, found, _COLUMNS, spare=("kind", ">hidden"))
    return Screen(tables=(models, table(traced, ("network", "a sample"), networks)))


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
    tables = (table("", ("", ""), facts), listing("Blocks", model.block_kinds(), _BLOCKS))
    return Screen(header=(model.name,), tables=tables)
