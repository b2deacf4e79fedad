"""Which run a row of a table of networks states; a row that states none says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from foreshard.catalog.devices import resolve_device
from foreshard.errors import SpecError
from foreshard.profile.networks.catalog import CLASSIFIERS, network_name
from foreshard.profile.networks.timm_models import PREFIX, timm_name
from foreshard.validation.networks.recipes import (
    DLE_BATCHES,
    DLE_CHANNELS_FIRST,
    DLE_DEVICE,
    DLE_NAMES,
    LAMBDA_MEDIA,
    LAMBDA_THROUGH_HOST,
    LAMBDA_WORDS,
    MLPERF,
    NO_BATCH,
    TrainingRecipe,
    dle_batch,
    dle_device,
    dle_run,
    lambda_batch,
    lambda_narrow,
    lambda_trained_share,
)
from foreshard.validation.networks.run import MEASURED_FRAMEWORK, NetworkRun

Row = Mapping[str, str]
_IMAGES = ("img/s", "imgs/second", "images/sec", "images per second")
_OTHER_FRAMEWORKS = {("PaddlePaddle", "BERT"), ("TensorFlow2", "BERT")}
"""Networks of other frameworks whose rows state how they are trained."""
_BEFORE_FUSED = "pytorch 1."
"""Releases without scaled_dot_product_attention, in whose place timm runs products and a softmax."""


def run_of(layout: str, row: Row) -> NetworkRun:
    """Return the run that a row of a table of some layout states.

    Raises
    ------
    SpecError
        Saying why there is none.
    """
    try:
        made = _READERS[layout](row)
    except KeyError as error:
        raise SpecError(f"no column {error.args[0]}") from None
    except (ValueError, ArithmeticError) as error:
        raise SpecError(f"a cell is not what its column says: {error}") from None
    if not 0.0 < made.samples_per_s < float("inf"):
        raise SpecError("no speed stated")
    if min(made.batch, made.num_devices, made.accumulated, made.nodes) < 1:
        raise SpecError("no whole number of samples on each device")
    if made.num_devices % made.nodes:
        raise SpecError("devices that the nodes do not share evenly")
    return made


def timm(row: Row) -> NetworkRun:
    """Return a row of timm's training benchmark; what the catalog lacks is made by timm's own code."""
    return _timm(row, device=resolve_device(row["gpu"]).name)


def timm_inference(row: Row) -> NetworkRun:
    """Return a row of timm's inference benchmark: a forward in evaluation, operation by operation."""
    if row["device"].startswith("CPU"):
        raise SpecError("run on processors of a host, which are no devices here")
    if row["mode"] != "eager":
        raise SpecError("compiled: fused kernels are not those of the operations")
    if row["precision"] != "amp":
        raise SpecError(f"no commands for {row['precision']!r}, but for amp")
    # from PyTorch 1.13 on, whose cuDNN 8.5 runs groups as 9 does
    return _timm(row, device=resolve_device(row["device"]).name, training=False, cudnn=9)


def _timm(row: Row, **given: Any) -> NetworkRun:
    batch, stated, model = int(float(row["batch_size"])), row.get("samples_per_sec"), row["model"]
    name = network_name(model) or timm_name(PREFIX + model)
    if name is None:
        raise SpecError(f"{model!r} is no name of timm's")
    parted = name.startswith(PREFIX) and row["framework"].startswith(_BEFORE_FUSED)
    return NetworkRun(
        source="timm",
        network=name,
        precision="fp16",
        layout=row["layout"],
        num_devices=1,
        batch=batch,
        side=int(float(row["img_size"])),
        samples_per_s=float(stated) if stated else batch / (1e-3 * float(row["step_time_ms"])),
        changed=(("fused_attention", False),) if parted else (),
        **given,
    )


def examples(row: Row) -> NetworkRun:
    """Return a row of NVIDIA's DeepLearningExamples, which put channels last in 16 bit."""
    framework, in_a_node = row["framework"], 16 if "DGX-2" in row["section"] else 8
    if framework != MEASURED_FRAMEWORK and (framework, row["model"]) not in _OTHER_FRAMEWORKS:
        raise SpecError(f"{framework} runs other kernels, none of which were measured")
    # devices of a node where nodes are counted, else of all
    count, nodes = int(row["num_gpus"] or in_a_node), int(row["num_nodes"] or 1)
    if not row["num_nodes"] and count > in_a_node:
        count, nodes = in_a_node, count // in_a_node
    known: dict[str, Any] = {"num_devices": count * nodes, "nodes": nodes, "framework": framework}
    source = "DeepLearningExamples"
    run = dle_run(row)
    if run is not None:
        batch, accumulated = dle_batch(row)
        precision = {"mixed": "fp16"}.get(row["precision"], row["precision"])
        known |= {"device": dle_device(row), "precision": precision, "accumulated": accumulated}
        return of_words(source, run, round(batch * run.samples), float(row["throughput"]), **known)
    network = row["seq_or_variant"].removeprefix("Model=") or row["model"]
    if network.startswith("GPUNet-D"):  # distilled
        raise SpecError(f"{network}: a teacher's forward is timed with it")
    name = _network(DLE_NAMES.get(network, network))
    if row["unit"] not in _IMAGES:
        raise SpecError(f"a speed of {name} in {row['unit']}, of which the samples are not stated")
    device, precision = DLE_DEVICE.get(row["gpu_model"]) or dle_device(row), _dle_precision(row)
    return NetworkRun(
        source=source,
        network=name,
        device=device,
        precision=precision,
        layout="nhwc" if _is_channels_last(name, precision) else "nchw",
        **known,
        batch=_dle_images(row, name, device, precision),
        samples_per_s=float(row["throughput"]),
    )


def _dle_precision(row: Row) -> str:
    """Return the precision of a row; 32 bit of an A100 is TF32, whatever a table calls it."""
    if row["precision"] == "fp32" and row["gpu_model"].startswith("A100"):
        return "tf32"
    return str(_said({"mixed": "fp16", "tf32": "tf32", "fp32": "fp32"}, row["precision"]))


def _is_channels_last(name: str, precision: str) -> bool:
    if name == "mask_rcnn":
        return precision != "fp32"
    return precision == "fp16" and name not in DLE_CHANNELS_FIRST


def _dle_images(row: Row, name: str, device: str, precision: str) -> int:
    """Return how many images a device takes at once: as a row states it, or else its benchmark's commands."""
    if row["batch_per_gpu"]:
        return int(row["batch_per_gpu"])
    try:
        return DLE_BATCHES[name][device][precision]
    except KeyError:
        raise SpecError(NO_BATCH) from None


def lambda_bench(row: Row) -> NetworkRun:
    """Return a row of Lambda's benchmark, which leaves the layout at channels first."""
    if row["model"] not in (*LAMBDA_WORDS, *LAMBDA_MEDIA):
        raise SpecError(f"no recipe of Lambda's for {row['model']} is known here")
    if "SUSPECT" in (notes := row.get("notes", "")):
        raise SpecError(f"flagged by its source: {notes.partition('SUSPECT: ')[2]}")
    device = resolve_device(row["gpu"].replace("H200 140GB", "H200 141GB"))
    count = int(row["num_gpus"])
    batch = lambda_batch(row, narrow=row["precision"].startswith("amp"))
    speed = float(row["throughput"]) * lambda_trained_share(row, batch)
    wide = "tf32" if device.supports("tf32") else "fp32"
    precision = "fp16" if lambda_narrow(row, device.memory_bytes) else wide
    if row["model"] in LAMBDA_WORDS:
        known = {"device": device.name, "precision": precision, "num_devices": count}
        known["through_host"] = device.name in LAMBDA_THROUGH_HOST
        return of_words("Lambda", LAMBDA_WORDS[row["model"]], batch, speed, **known)
    name, optimizer, units = LAMBDA_MEDIA[row["model"]]
    return NetworkRun(
        source="Lambda",
        network=name,
        device=device.name,
        precision=precision,
        layout="nchw",
        num_devices=count,
        batch=batch,
        side=224 if name in CLASSIFIERS else None,
        samples_per_s=speed / units,
        optimizer=optimizer,
        through_host=device.name in LAMBDA_THROUGH_HOST,
    )


def mlperf(row: Row) -> NetworkRun:
    """Return a row of MLPerf Training: one run of a submission, in 16 bit with channels last."""
    name = MLPERF.get(row["benchmark"]) or _network(row["benchmark"])
    if (name, row["round"]) == ("retinanet", "v1.0"):
        raise SpecError("SSD of the first rounds, of a size that is not in the catalog")
    if not row["tracked_throughput_median"]:
        raise SpecError("no throughput logged")
    count, nodes = int(row["num_accelerators"]), int(row["nodes"])
    accelerator = row["accelerator"].replace("CTS", "")
    if count > 8 * nodes:
        raise SpecError("more than 8 devices on a node, what joins them not stated")
    return NetworkRun(
        source="MLPerf",
        network=name,
        device=resolve_device(re.sub(r"\(.*", "", accelerator).strip()).name,
        precision="fp16",
        layout="nhwc",
        num_devices=count,
        nodes=nodes,
        batch=int(row["global_batch"]) // count,
        side=224 if name in CLASSIFIERS else None,
        # RetinaNet's logs count the images of one device: so many passes over the images end a run
        samples_per_s=float(row["tracked_throughput_median"]) * (count if name == "retinanet" else 1),
    )


_READERS: Mapping[str, Callable[[Row], NetworkRun]] = {
    "timm": timm,
    "timm-inference": timm_inference,
    "deep-learning-examples": examples,
    "lambda": lambda_bench,
    "mlperf": mlperf,
}
"""By the layout of a table."""


def of_words(source: str, run: TrainingRecipe, batch: int, speed: float, **given: Any) -> NetworkRun:
    """Return a speed of a network of words or tables, which a source may count in tokens."""
    return NetworkRun(
        source=source,
        network=run.network,
        layout=f"{batch} at once",
        batch=batch,
        samples_per_s=speed / run.counted,
        optimizer=run.optimizer,
        sums=run.sums,
        changed=tuple(sorted(run.changed.items())),
        **given,
    )


def _said(known: Mapping[str, Any], value: str) -> Any:
    """Return what the commands of a source say of a value of a row."""
    if value not in known:
        raise SpecError(f"no commands for {value!r}, but for {', '.join(known)}")
    return known[value]


def _network(text: str) -> str:
    """Return the name of a network that can be traced."""
    name = network_name(text)
    if name is None:
        raise SpecError(f"{text}: no such network in the catalog")
    return name
