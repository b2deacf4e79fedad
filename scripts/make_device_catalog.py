"""Derive the shipped device, link and instance catalog from the measured hardware tables.

Reads hw_accelerators.csv, hw_interconnects.csv and hw_cloud_instances.csv (FORESHARD_MEASURED, default
../shared/measured/dev) and writes src/foreshard/catalog/data/{devices,interconnects,instances}.json.
Run it again after a table or a list below changes; the output is deterministic.
"""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLES = Path(os.environ.get("FORESHARD_MEASURED", ROOT.parent / "shared" / "measured" / "dev"))
DATA = ROOT / "src" / "foreshard" / "catalog" / "data"
GIB = 2.0**30

# Row of hw_accelerators.csv -> (canonical name, family, form, architecture).
NAMES = {
    "K80 (board, 2 GPUs)": ("k80-board", "k80-board", "pcie", "kepler"),
    "M40": ("m40", "m40", "pcie", "maxwell"),
    "P4": ("p4", "p4", "pcie", "pascal"),
    "P40": ("p40", "p40", "pcie", "pascal"),
    "P100 PCIe 16GB": ("p100-pcie", "p100", "pcie", "pascal"),
    "P100 SXM2": ("p100-sxm", "p100", "sxm", "pascal"),
    "GTX 1080 Ti": ("gtx-1080-ti", "gtx-1080-ti", "pcie", "pascal"),
    "V100 PCIe 16/32GB": ("v100-pcie-32gb", "v100", "pcie", "volta"),
    "V100 SXM2 16/32GB": ("v100-sxm-32gb", "v100", "sxm", "volta"),
    "V100S PCIe": ("v100s-pcie", "v100s", "pcie", "volta"),
    "RTX 2080": ("rtx-2080", "rtx-2080", "pcie", "turing"),
    "RTX 2080 Ti": ("rtx-2080-ti", "rtx-2080-ti", "pcie", "turing"),
    "Titan RTX": ("titan-rtx", "titan-rtx", "pcie", "turing"),
    "Quadro RTX 8000": ("quadro-rtx-8000", "quadro-rtx-8000", "pcie", "turing"),
    "T4": ("t4", "t4", "pcie", "turing"),
    "A100 PCIe 40GB": ("a100-pcie-40gb", "a100", "pcie", "ampere"),
    "A100 PCIe 80GB": ("a100-pcie-80gb", "a100", "pcie", "ampere"),
    "A100 SXM4 40GB": ("a100-sxm-40gb", "a100", "sxm", "ampere"),
    "A100 SXM4 80GB": ("a100-sxm-80gb", "a100", "sxm", "ampere"),
    "A800 SXM4 80GB": ("a800-sxm-80gb", "a800", "sxm", "ampere"),
    "A30": ("a30", "a30", "pcie", "ampere"),
    "A10": ("a10", "a10", "pcie", "ampere"),
    "A10G": ("a10g", "a10g", "pcie", "ampere"),
    "A40": ("a40", "a40", "pcie", "ampere"),
    "RTX A4000": ("rtx-a4000", "rtx-a4000", "pcie", "ampere"),
    "RTX A5000": ("rtx-a5000", "rtx-a5000", "pcie", "ampere"),
    "RTX A6000": ("rtx-a6000", "rtx-a6000", "pcie", "ampere"),
    "RTX 3080 10GB": ("rtx-3080", "rtx-3080", "pcie", "ampere"),
    "RTX 3090": ("rtx-3090", "rtx-3090", "pcie", "ampere"),
    "RTX 4090": ("rtx-4090", "rtx-4090", "pcie", "ada"),
    "RTX 5090": ("rtx-5090", "rtx-5090", "pcie", "blackwell"),
    "RTX 6000 Ada": ("rtx-6000-ada", "rtx-6000-ada", "pcie", "ada"),
    "L4": ("l4", "l4", "pcie", "ada"),
    "L40": ("l40", "l40", "pcie", "ada"),
    "L40S": ("l40s", "l40s", "pcie", "ada"),
    "H100 PCIe": ("h100-pcie", "h100", "pcie", "hopper"),
    "H100 SXM5 80GB": ("h100-sxm", "h100", "sxm", "hopper"),
    "H100 NVL (per GPU)": ("h100-nvl", "h100-nvl", "pcie", "hopper"),
    "H200 SXM": ("h200-sxm", "h200", "sxm", "hopper"),
    "H200 NVL": ("h200-nvl", "h200-nvl", "pcie", "hopper"),
    "GH200 96GB": ("gh200-96gb", "gh200", "superchip", "hopper"),
    "GH200 144GB": ("gh200-144gb", "gh200", "superchip", "hopper"),
    "H800 SXM": ("h800-sxm", "h800", "sxm", "hopper"),
    "H20": ("h20-sxm", "h20", "sxm", "hopper"),
    "B100 SXM": ("b100-sxm", "b100", "sxm", "blackwell"),
    "B200 SXM": ("b200-sxm", "b200", "sxm", "blackwell"),
    "GB200 (per GPU)": ("gb200-nvl72", "gb200", "superchip", "blackwell"),
    "B300 SXM": ("b300-sxm", "b300", "sxm", "blackwell"),
    "GB300 (per GPU)": ("gb300-nvl72", "gb300", "superchip", "blackwell"),
    "Rubin (per GPU)": ("rubin-nvl72", "rubin", "superchip", "rubin"),
    "RTX PRO 6000 Blackwell Server": ("rtx-pro-6000-server", "rtx-pro-6000-server", "pcie", "blackwell"),
    "MI25": ("mi25", "mi25", "pcie", "vega"),
    "MI50 32GB": ("mi50", "mi50", "pcie", "vega"),
    "MI100": ("mi100", "mi100", "pcie", "cdna1"),
    "MI210": ("mi210", "mi210", "pcie", "cdna2"),
    "MI250": ("mi250", "mi250", "oam", "cdna2"),
    "MI250X": ("mi250x", "mi250x", "oam", "cdna2"),
    "MI300X": ("mi300x", "mi300x", "oam", "cdna3"),
    "MI300A": ("mi300a", "mi300a", "apu", "cdna3"),
    "MI325X": ("mi325x", "mi325x", "oam", "cdna3"),
    "MI350X": ("mi350x", "mi350x", "oam", "cdna4"),
    "MI355X": ("mi355x", "mi355x", "oam", "cdna4"),
    "TPU v2 (chip)": ("tpu-v2", "tpu-v2", "board", "tpu"),
    "TPU v3 (chip)": ("tpu-v3", "tpu-v3", "board", "tpu"),
    "TPU v4 (chip)": ("tpu-v4", "tpu-v4", "board", "tpu"),
    "TPU v5e (chip)": ("tpu-v5e", "tpu-v5e", "board", "tpu"),
    "TPU v5p (chip)": ("tpu-v5p", "tpu-v5p", "board", "tpu"),
    "TPU v6e (chip)": ("tpu-v6e", "tpu-v6e", "board", "tpu"),
    "TPU v7x Ironwood (chip)": ("tpu-v7x", "tpu-v7x", "board", "tpu"),
    "Gaudi (HL-205)": ("gaudi", "gaudi", "oam", "gaudi"),
    "Gaudi 2": ("gaudi-2", "gaudi-2", "oam", "gaudi"),
    "Gaudi 3": ("gaudi-3", "gaudi-3", "oam", "gaudi"),
    "Trainium1 (chip)": ("trainium-1", "trainium-1", "board", "neuron"),
    "Inferentia2 (chip)": ("inferentia-2", "inferentia-2", "board", "neuron"),
    "Trainium2 (chip)": ("trainium-2", "trainium-2", "board", "neuron"),
    "Ascend 910": ("ascend-910", "ascend-910", "oam", "davinci"),
    "Arc Pro B60": ("arc-pro-b60", "arc-pro-b60", "pcie", "xe2"),
}

RECALLED = "vendor datasheet (recalled, page not re-read)"
# Cards that differ from a base card of their architecture in size and clock: name, base, lanes of a
# processor, rates over that of fp32, processors, MHz, GB, GB/s, MB of L2, W, year, other columns.
_ADA = {"tf32": 1, "fp16": 2, "bf16": 2, "fp8": 4, "int8": 8}
_WORKSTATION = {"tf32": 2, "fp16": 4, "bf16": 4, "int8": 8}
_X8, _NO_LINK = {"pcie": "4.0x8"}, {"link": "", "link_gbps_per_dir": ""}
CARDS = [
    ("rtx-2070", "RTX 2080", 64, {"fp16": 4, "int8": 16}, 36, 1620, 8, 448, 4, 175, 2018, _NO_LINK),
    ("rtx-4060-ti", "RTX 4090", 128, _ADA, 34, 2535, 16, 288, 32, 165, 2023, _X8 | {"mem_type": "GDDR6"}),
    ("rtx-4070-super", "RTX 4090", 128, _ADA, 56, 2475, 12, 504, 48, 220, 2024, {}),
    ("rtx-4070-ti-super", "RTX 4090", 128, _ADA, 66, 2610, 16, 672, 48, 285, 2024, {}),
    ("rtx-4080-super", "RTX 4090", 128, _ADA, 80, 2550, 16, 736, 64, 320, 2024, {}),
    ("rtx-5070", "RTX 5090", 128, _ADA | {"fp4": 16}, 48, 2512, 12, 672, 48, 250, 2025, {}),
    ("rtx-a4500", "RTX A5000", 128, _WORKSTATION, 56, 1650, 20, 640, 6, 200, 2021, {}),
    ("rtx-a5500", "RTX A5000", 128, _WORKSTATION, 80, 1665, 24, 768, 6, 230, 2022, {}),
    ("a2", "RTX A5000", 128, _WORKSTATION, 10, 1770, 16, 200, 2, 60, 2021, _X8 | _NO_LINK),
]


def card(
    lanes: int, rates: dict, sms: int, mhz: int, gb: int, gbps: int, l2: int, watt: int, year: int
) -> dict:
    """Columns of a card as in hw_accelerators.csv: an operation of two FLOP a lane and cycle."""
    fp32 = round(sms * lanes * 2 * mhz * 1e-6, 1)
    columns = {f"{name}_tflops": fp32 * rate for name, rate in rates.items() if name != "int8"}
    columns |= {"fp32_tflops": fp32, "int8_tops": fp32 * rates["int8"], "mem_gb": gb, "mem_bw_gbps": gbps}
    return columns | {
        "l2_mb": l2,
        "sm_or_cu": sms,
        "boost_mhz": mhz,
        "tdp_w": watt,
        "year": year,
        "fp64_tflops": "",
    }


def variants() -> list[tuple[str, str, dict, str, str]]:
    """Devices that hw_accelerators.csv lacks: (name, base row, changed columns of it, family, note).

    In device_variants.csv a blank cell is the base row's, and a dash stands for nothing.
    """
    with Path(__file__).with_name("device_variants.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    about = [[row.pop(key) for key in ("name", "base", "family", "note")] for row in rows]
    made = [
        (name, base, {key: "" if cell == "-" else cell for key, cell in row.items() if cell}, family, note)
        for (name, base, family, note), row in zip(about, rows, strict=True)
    ]
    return made + [
        (name, base, card(*sizes) | more, name, "FP32-accumulate rates" if base[:5] != "RTX A" else "")
        for name, base, *sizes, more in CARDS
    ]


# Boost clocks where the table has the clock at which the peak is quoted; its notes say "max clock 1980".
BOOST_MHZ = dict.fromkeys(("h100-sxm", "h100-sxm-96gb", "h200-sxm", "gh200-96gb", "gh200-144gb"), 1980.0)
# Memory sizes by which tables and vendors also call a device (GB); the first column's size is always one.
OTHER_SIZES = {
    "b200-sxm": [179, 192],
    "b300-sxm": [268, 288],
    "gb200-nvl72": [184, 185, 192],
    "gb300-nvl72": [278, 288],
    "gh200-144gb": [141],
    "h20-sxm": [],
    "h100-sxm-96gb": [],
}

# Bytes per second of PCIe x16, one direction. Generations 4-6: hw_interconnects.csv. Generation 3 is not
# there: 8 GT/s x 16 lanes x 128/130 / 8 (PCI Express Base 3.0). x8 is half.
PCIE3_X16 = 15.75e9

# Total memory a process sees (GiB), as PyTorch's out-of-memory message prints it, and where. It moves by
# about 0.2 GiB with driver and ECC state; one printed value is kept. Other devices keep the datasheet size.
OOM = "PyTorch out-of-memory message"
CAPACITY_GIB: dict[str, tuple[float, str]] = {
    "a100-sxm-80gb": (79.15, f"{OOM} beside nvidia-smi 81920MiB, public logs"),
    "a100-sxm-40gb": (39.49, f"{OOM} on Perlmutter, public log"),
    "h100-sxm": (79.21, f"{OOM} on 8xH100, public log"),
    "h200-sxm": (139.80, f"{OOM}, stas00/ml-engineering debug/pytorch.md"),
    "b200-sxm": (178.35, f"{OOM} on 8xB200, public log"),
    "gb200-nvl72": (184.31, f"{OOM} on GB200, public vLLM log"),
    "b300-sxm": (268.6, "ai-dynamo/aiconfigurator systems/b300_sxm.yaml"),
    "gb300-nvl72": (276.50, f"{OOM} on DGX Station GB300, stas00/ml-engineering debug/pytorch.md"),
    "v100-sxm-32gb": (31.73, f"{OOM} on V100-SXM2-32GB, public log"),
    "t4": (14.75, f"{OOM}, hpcaitech/Open-Sora#697"),
    "v100-sxm-16gb": (15.78, f"{OOM} on V100 16 GB, kchengiva/Shift-GCN#34"),
    "rtx-3080": (9.78, f"{OOM}, zai-org/CogVideo#34"),
    "rtx-3090": (23.70, f"{OOM}, GaoLii/DSP#10"),
    "rtx-4090": (23.64, f"{OOM}, 3DTopia/Phidias-Diffusion#8"),
    "rtx-a4000": (15.61, f"{OOM}, DengKaiCQ/VGGT-Long#6"),
    "l40s": (44.40, f"{OOM} on L40S, public log"),
    "l4": (22.03, f"{OOM} on L4 or A10G, public logs"),
    "a10g": (22.03, f"{OOM} on L4 or A10G, public logs"),
    "mi300x": (191.69, f"{OOM} (HIP, 192 GB device), public logs"),
    "mi355x": (287.98, f"{OOM} on MI355X, public log"),
}


def pcie_bytes_per_s(text: str, links: dict[str, float]) -> float:
    if not text:
        return 0.0
    generation, _, lanes = text.partition("x")
    full = PCIE3_X16 if generation == "3.0" else links[f"PCIe{generation[0]} x16"]
    return full / 2 if lanes == "8" else full


def number(row: dict, key: str) -> float:
    return float(row[key]) if row.get(key) not in ("", None) else 0.0


def peaks(row: dict, arch: str) -> dict[str, float]:
    found = {
        name: number(row, f"{name}_tflops") * 1e12
        for name in ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
    }
    found["int8"] = number(row, "int8_tops") * 1e12
    # Matrix rates where the vendor has a matrix unit for the type.
    found["fp64"] = max(found["fp64"], number(row, "fp64_matrix_tflops") * 1e12)
    if arch in ("cdna1", "cdna2"):  # the table keeps FP32 matrix in the tf32 column there
        found["fp32"], found["tf32"] = max(found["fp32"], found["tf32"]), 0.0
    return {name: value for name, value in found.items() if value}


def device(name: str, family: str, form: str, arch: str, row: dict, links: dict, note: str = "") -> dict:
    memory_bytes = number(row, "mem_gb") * GIB
    gib, place = CAPACITY_GIB.get(name, (number(row, "mem_gb"), ""))
    notes = "; ".join(
        part.strip("; ") for part in (note, row["notes"], place and f"capacity: {place}") if part.strip("; ")
    )
    return {
        "name": name,
        "vendor": row["vendor"].split("/")[0].lower(),
        "arch": arch,
        "form": form,
        "year": int(row["year"]),
        "peak_flops_per_s": peaks(row, arch),
        "memory_bytes": memory_bytes,
        "capacity_bytes": gib * GIB,
        "memory_bytes_per_s": number(row, "mem_bw_gbps") * 1e9,
        "num_sms": int(number(row, "sm_or_cu")),
        "clock_hz": BOOST_MHZ.get(name, number(row, "boost_mhz")) * 1e6,
        "l2_bytes": number(row, "l2_mb") * 2**20,
        "link": row["link"],
        "link_bytes_per_s": number(row, "link_gbps_per_dir") * 1e9,
        "pcie_bytes_per_s": pcie_bytes_per_s(row["pcie"], links),
        "tdp_w": number(row, "tdp_w"),
        "source": f"{row['source']}; {row['verification']}",
        "verified": not re.search("recalled|pre-release", row["verification"]),
        "notes": notes,
        "family": family,
        "memory_type": row["mem_type"].lower(),
        "sizes_gb": sorted({int(number(row, "mem_gb")), *OTHER_SIZES.get(name, [])}),
    }


def variant(name: str, base: dict, changed: dict, family: str, note: str, links: dict) -> dict:
    _, _, form, arch = NAMES[base["accelerator"]]
    row = base | {key: str(value) for key, value in changed.items()}
    if set(changed) - {"mem_gb", "form", "boost_mhz", "tdp_w"}:
        row["verification"], row["notes"] = RECALLED, ""
        row["source"] = (
            f"derived from {base['source']}"
            if name.endswith("-gcd") or name == "k80"
            else f"datasheet of {name}"
        )
    form = str(changed.get("form", form)).lower()
    return device(name, family, form, str(changed.get("arch", arch)).lower(), row, links, note)


def read(name: str) -> list[dict]:
    with (TABLES / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def make_devices(links: dict[str, float]) -> list[dict]:
    rows = {row["accelerator"]: row for row in read("hw_accelerators.csv")}
    missing = set(rows) ^ set(NAMES)
    if missing:
        raise SystemExit(f"NAMES and hw_accelerators.csv differ: {sorted(missing)}")
    made = [device(*NAMES[key], row, links) for key, row in rows.items()]
    made += [
        variant(name, rows[base], changed, family, note, links)
        for name, base, changed, family, note in variants()
    ]
    return sorted(made, key=lambda item: item["name"])


# gpu column and memory of hw_cloud_instances.csv -> device
INSTANCE_DEVICE = {
    "K80 (1 of 2 dies)": "k80",
    "K80 dies": "k80",
    "P100 PCIe": "p100-pcie",
    "V100 PCIe": "v100-pcie-{}gb",
    "V100 SXM2": "v100-sxm-{}gb",
    "A100 SXM4": "a100-sxm-{}gb",
    "A100 PCIe": "a100-pcie-{}gb",
    "H100 SXM5": "h100-sxm",
    "H100 NVL": "h100-nvl",
    "H100": "h100-sxm",
    "H200 SXM": "h200-sxm",
    "B200 SXM": "b200-sxm",
    "GB200": "gb200-nvl72",
    "GH200": "gh200-96gb",
    "MI300X": "mi300x",
    "T4": "t4",
    "A10G": "a10g",
    "A10": "a10",
    "L4": "l4",
    "L40S": "l40s",
    "RTX PRO 6000": "rtx-pro-6000-server",
    "Trainium1": "trainium-1",
    "Trainium2": "trainium-2",
    "Inferentia2": "inferentia-2",
    "Gaudi": "gaudi",
    "TPU v4": "tpu-v4",
    "TPU v5e": "tpu-v5e",
    "TPU v5p": "tpu-v5p",
    "TPU v6e": "tpu-v6e",
}


# What "same remark" of the table stands for.
SAME_REMARK = (
    "listed values 1.1x above another region are dedicated tenancy; a June 2025 AWS P4/P5 price cut "
    "is recalled (unverified), not reflected"
)

# Instances that the table lacks, without prices: name, device, devices, Gb/s of a node, network, inner links.
RECALLED_INSTANCES = [
    ("aws-g5.24xlarge", "a10g", 4, 50, "ENA", "PCIe4"),
    ("aws-g6.24xlarge", "l4", 4, 50, "ENA", "PCIe4"),
    ("aws-g6e.24xlarge", "l40s", 4, 200, "EFA", "PCIe4"),
    ("aws-p5.4xlarge", "h100-sxm", 1, 100, "EFAv2", "none"),
    ("aws-p6-b300.48xlarge", "b300-sxm", 8, 6400, "EFAv4", "NVLink5/NVSwitch"),
    ("aws-trn2u.48xlarge", "trainium-2", 16, 3200, "EFAv3", "NeuronLink"),
    ("azure-nc6s-v3", "v100-pcie-16gb", 1, 6, "Ethernet", "none"),
    ("azure-nc12s-v3", "v100-pcie-16gb", 2, 12, "Ethernet", "PCIe3"),
    ("azure-nc24s-v3", "v100-pcie-16gb", 4, 24, "Ethernet", "PCIe3"),
    ("azure-nd128isr-gb300-v6", "gb300-nvl72", 4, 3200, "InfiniBand XDR", "NVLink5/NVL72"),
    ("gcp-a3-highgpu-1g", "h100-sxm", 1, 25, "gVNIC", "none"),
    ("gcp-a3-highgpu-2g", "h100-sxm", 2, 50, "gVNIC", "NVLink4/NVSwitch"),
    ("gcp-a3-highgpu-4g", "h100-sxm", 4, 100, "gVNIC", "NVLink4/NVSwitch"),
    ("gcp-a3-edgegpu-8g", "h100-sxm", 8, 600, "GPUDirect-TCPX", "NVLink4/NVSwitch"),
    ("gcp-a4x-maxgpu-4g-metal", "gb300-nvl72", 4, 3600, "RoCE", "NVLink5/NVL72"),
    ("gcp-g2-standard-4", "l4", 1, 10, "gVNIC", "none"),
    ("gcp-g2-standard-8", "l4", 1, 16, "gVNIC", "none"),
    ("gcp-g2-standard-12", "l4", 1, 16, "gVNIC", "none"),
    ("gcp-g2-standard-16", "l4", 1, 32, "gVNIC", "none"),
    ("gcp-g2-standard-24", "l4", 2, 32, "gVNIC", "PCIe4"),
    ("gcp-g2-standard-32", "l4", 1, 32, "gVNIC", "none"),
    ("gcp-g2-standard-48", "l4", 4, 50, "gVNIC", "PCIe4"),
    ("gcp-a2-highgpu-2g", "a100-sxm-40gb", 2, 32, "Ethernet", "NVLink3/NVSwitch"),
    ("gcp-a2-highgpu-4g", "a100-sxm-40gb", 4, 50, "Ethernet", "NVLink3/NVSwitch"),
    ("gcp-a2-ultragpu-4g", "a100-sxm-80gb", 4, 50, "Ethernet", "NVLink3/NVSwitch"),
    ("lambda-gpu-1x-a100-sxm4", "a100-sxm-40gb", 1, None, "Ethernet", "none"),
    ("lambda-gpu-1x-h100-pcie", "h100-pcie", 1, None, "Ethernet", "none"),
    ("lambda-gpu-8x-a100", "a100-sxm-40gb", 8, None, "Ethernet", "NVLink"),
    ("nvidia-dgx-1", "v100-sxm-16gb", 8, 400, "InfiniBand EDR", "NVLink2 hybrid cube mesh"),
    ("oci-bm.gpu3.8", "v100-sxm-16gb", 8, 50, "Ethernet", "NVLink2 hybrid cube mesh"),
    ("oci-vm.gpu3.1", "v100-sxm-16gb", 1, 4, "Ethernet", "none"),
    ("oci-vm.gpu3.2", "v100-sxm-16gb", 2, 8, "Ethernet", "NVLink2"),
    ("oci-vm.gpu3.4", "v100-sxm-16gb", 4, 24.6, "Ethernet", "NVLink2"),
    ("oci-bm.gpu4.8", "a100-sxm-40gb", 8, 1600, "RoCE", "NVLink3/NVSwitch"),
    ("oci-bm.gpu.a100-v2.8", "a100-sxm-80gb", 8, 1600, "RoCE", "NVLink3/NVSwitch"),
    ("oci-bm.gpu.h100.8", "h100-sxm", 8, 3200, "RoCE", "NVLink4/NVSwitch"),
    ("oci-bm.gpu.h200.8", "h200-sxm", 8, 3200, "RoCE", "NVLink4/NVSwitch"),
    ("oci-bm.gpu.b200.8", "b200-sxm", 8, 3200, "RoCE", "NVLink5/NVSwitch"),
    ("oci-bm.gpu.mi300x.8", "mi300x", 8, 3200, "RoCE", "Infinity Fabric"),
    ("oci-bm.gpu.l40s.4", "l40s", 4, 800, "RoCE", "PCIe4"),
]


def recalled_instance(
    name: str, device: str, count: int, gbps: float | None, network: str, links: str
) -> dict:
    """Return an instance known by its vendor's pages only."""
    return {
        "name": name,
        "device": device,
        "per_node": count,
        "nic_bytes_per_s": None if gbps is None else gbps * 1e9 / 8,
        "network": network,
        "intra_link": links,
        "usd_per_h": None,
        "price_region": "",
        "price_date": None,
        "price_source": "",
        "spec_source": "pages of the vendor (recalled, not re-read)",
        "notes": "",
    }


def instance(row: dict) -> dict:
    slug = (
        re.sub(r"\s*\(.*?\)", "", row["instance"])
        .lower()
        .replace("_", "-")
        .replace(" + ", "-")
        .replace(" ", "-")
    )
    network = re.sub("up to ", "", row["network_gbps"])
    notes = "; ".join(
        part
        for part in (
            "made for inference" if row["gpu"].startswith("Inferentia") else "",
            row["notes"].strip("; ").replace("same remark", SAME_REMARK),
            "network is an upper bound ('up to')" if "up to" in row["network_gbps"] else "",
            "the source does not say which H100; taken as SXM" if row["gpu"] == "H100" else "",
        )
        if part
    )
    return {
        "name": f"{row['provider'].lower()}-{slug}",
        "device": INSTANCE_DEVICE[row["gpu"]].format(row["gpu_mem_gb_each"]),
        "per_node": int(row["gpu_count"]),
        "nic_bytes_per_s": float(network) * 1e9 / 8 if network else None,
        "network": row["inter_node_network"],
        "intra_link": row["intra_node_link"],
        "usd_per_h": float(row["on_demand_usd_per_h"]) if row["on_demand_usd_per_h"] else None,
        "price_region": row["price_region"],
        "price_date": row["price_date"].replace("undated page in corpus", "undated") or None,
        "price_source": row["price_source"],
        "spec_source": row["spec_source"],
        "notes": notes,
    }


def make_instances() -> list[dict]:
    """One entry per instance; a second row of the same instance only adds its price source as a note."""
    made: dict[str, dict] = {}
    for row in read("hw_cloud_instances.csv"):
        entry = instance(row)
        first = made.setdefault(entry["name"], entry)
        if first is not entry:
            first["notes"] += (
                f"; second source {entry['price_date']}: {entry['usd_per_h']} USD/h, {entry['price_source']}"
            )
    more = [recalled_instance(*sizes) for sizes in RECALLED_INSTANCES]
    return sorted([*made.values(), *more], key=lambda item: item["name"])


def write(name: str, rows: list[dict]) -> None:
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (DATA / name).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{name}: {len(rows)}")


def main() -> None:
    interconnects = [
        {
            "name": row["interconnect"],
            "context": row["context"],
            "bytes_per_s": float(row["unidir_gbps_GB"]) * 1e9,
            "source": f"{row['source']} {row['url_or_repo_path']}",
        }
        for row in read("hw_interconnects.csv")
    ]
    links = {row["name"]: row["bytes_per_s"] for row in interconnects}
    write("interconnects.json", interconnects)
    write("devices.json", make_devices(links))
    write("instances.json", make_instances())


if __name__ == "__main__":
    main()
