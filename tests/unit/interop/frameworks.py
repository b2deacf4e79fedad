"""How each framework itself reads what is exported for it; a test asks for one and skips without it.

The packages are not installed for the tests. docs/export.md says how to put one on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def need(name: str) -> Any:
    """Return a module of a framework, or skip the test with the reason."""
    return pytest.importorskip(name, reason=f"{name.split('.', 1)[0]} is not on PYTHONPATH")


def need_release(name: str) -> str:
    """Return the release of a package that a framework asks for, or skip the test with the reason."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not on PYTHONPATH")


def need_torchtitan(release: str) -> None:
    """Skip unless torchtitan is there in a release that starts so."""
    need("torchtitan")
    found = need_release("torchtitan")
    if not found.startswith(release):
        pytest.skip(f"torchtitan {found} is on PYTHONPATH, not {release}")


class Megatron:
    """``parse_args``, ``validate_args`` and the TransformerConfig made of them, as on Hopper devices.

    Transformer Engine and a device are not there: what asks for them hears that they are.
    """

    # What every run adds: data, learning rate, and kernels that need no Transformer Engine.
    ADDED = (
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--lr",
        "1e-4",
        "--train-iters",
        "1",
        "--transformer-impl",
        "local",
        "--no-rope-fusion",
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        import torch

        self.patch = monkeypatch
        monkeypatch.setattr(typing, "override", lambda method: method, raising=False)  # it is of Python 3.12
        need("megatron.training.arguments")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0))
        self.arguments = sys.modules["megatron.training.arguments"]
        for name in ("megatron.training.arguments", "megatron.core.transformer.transformer_config"):
            module = importlib.import_module(name)
            monkeypatch.setattr(module, "is_te_min_version", lambda *_, **__: True, raising=False)

    def read(self, words: list[str], world_size: int, script: str) -> tuple[Any, Any]:
        """Return the arguments and the configuration that a run of `world_size` ranks would have."""
        self.patch.setenv("WORLD_SIZE", str(world_size))
        self.patch.setenv("RANK", "0")
        if "\nexport CUDA_DEVICE_MAX_CONNECTIONS=1" in script:
            self.patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        else:
            self.patch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        self.patch.setattr(sys, "argv", ["pretrain_gpt.py", *words, *self.ADDED])
        arguments = self.arguments.validate_args(self.arguments.parse_args())
        return arguments, self.arguments.core_transformer_config_from_args(arguments)


def read_torchtitan_02(path: Path, world_size: int) -> tuple[Any, Any]:
    """Return the JobConfig and the ParallelDims that ``torchtitan.train`` makes of a TOML file."""
    need_torchtitan("0.2")
    config = need("torchtitan.config").ConfigManager().parse_args([f"--job.config_file={path}"])
    parallel = config.parallelism
    dims = importlib.import_module("torchtitan.distributed.parallel_dims").ParallelDims(
        dp_shard=parallel.data_parallel_shard_degree,
        dp_replicate=parallel.data_parallel_replicate_degree,
        cp=parallel.context_parallel_degree,
        tp=parallel.tensor_parallel_degree,
        pp=parallel.pipeline_parallel_degree,
        ep=parallel.expert_parallel_degree,
        etp=parallel.expert_tensor_parallel_degree,
        world_size=world_size,
    )
    return config, dims


def read_torchtitan_03(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the Trainer.Config that ``--module foreshard_recipe --config planned`` makes."""
    need_torchtitan("0.3")
    need("torchtitan.trainer")
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    quantized = importlib.import_module("torchtitan.components.quantization.float8")
    monkeypatch.setattr(quantized, "has_cuda_capability", lambda *_: True)  # as on Hopper devices
    manager = importlib.import_module("torchtitan.config").ConfigManager()
    return manager.parse_args(["--module", path.stem, "--config", "planned"])


def read_deepspeed(path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the DeepSpeedConfig of a run of `world_size` data-parallel ranks."""
    config = need("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda *_: world_size)
    return config.DeepSpeedConfig(str(path))


def read_accelerate(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, str], Any]:
    """Return the arguments, the environment and the ParallelismConfig of ``accelerate launch``."""
    launch = need("accelerate.commands.launch")
    parser = launch.launch_command_parser()
    given = parser.parse_args(["--config_file", str(path), "train.py"])
    arguments, _, _ = launch._validate_launch_command(given)
    if arguments.parallelism_config_tp_size > 1:
        need_release("transformers")
    environment = importlib.import_module("accelerate.utils.launch").prepare_multi_gpu_env(arguments)
    for name, value in environment.items():
        if name not in os.environ:
            monkeypatch.setenv(name, value)
    return (
        arguments,
        environment,
        importlib.import_module("accelerate.parallelism_config").ParallelismConfig(),
    )


def read_skypilot(path: Path) -> Any:
    """Return the Task of a YAML file."""
    return need("sky").Task.from_yaml(str(path))


def read_torchrun(line: str) -> Any:
    """Return what torchrun makes of a command line, its variables filled in as on the first of two nodes."""
    run = pytest.importorskip("torch.distributed.run", reason="torch is not installed")
    words = line.split()
    return run.get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
