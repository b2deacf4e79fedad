"""What a framework lets its user choose, so that advice never names what it does not ship."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from foreshard.catalog.memory_profiles import memory_profile
from foreshard.catalog.shipped import inherited, shipped
from foreshard.errors import SpecError
from foreshard.spec.device import Device
from foreshard.spec.framework import Framework, Overrides
from foreshard.spec.model import Model
from foreshard.spec.plan import LOW_PRECISIONS, WHOLE_MODEL, Plan

_RUNS = {
    "rowwise": ("hopper", "blackwell", "rubin", "cdna3", "cdna4"),
    "blockwise": ("hopper", "blackwell", "rubin"),
}
"""Architectures with code for products of such scales: torch._scaled_mm (CUTLASS, hipBLASLt), cuBLAS 12.9."""

_SENDS = {
    "deepep": ("ampere", "hopper", "blackwell", "rubin"),
    "hybridep": ("hopper", "blackwell", "rubin"),
}
"""Architectures with code for a dispatcher: DeepEP's README, and of its branch hybrid-ep."""

_OF_TORCH = ("eager", "compiled")
"""How PyTorch runs a framework's elementwise operations, without and with torch.compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """Choices of one framework.

    zero : levels of sharding; 3 is FSDP where the framework calls it so
    in_groups : levels that can shard over a part of the replicas and copy over the others
    schedules : of the pipelines it runs, empty without pipelines
    ordered : schedules priced by following their order, which a search takes only where they are stated
    overlaps : communication options it has a switch for
    degrees : kinds of parallelism besides data parallelism, sp where tensor parallelism may cut sequences
    recompute : leading words of the recompute rules it takes; with "selective", modules as Megatron names
        them and parts of a stage (full:uniform:N, full:block:N) too
    narrower : dtypes of products that a run in fp32 or tf32 may take instead
    low_precision : whether it trains with 8-bit matrix products
    fp8_recipes : how it scales their operands, if it has a choice or one of its own
    dispatchers : what may send tokens to experts, where there is a choice
    shards_pipelines : whether levels above 1 go with pipelines
    sharded_by : the framework that the same flags switch to at levels it does not have itself
    offload : what it can keep in host memory
    cpu_offload : what its own switch of that name moves there: optimizer, or weights with their gradients and
        optimizer states; empty without such a switch
    """

    zero: tuple[int, ...]
    in_groups: tuple[int, ...] = (1, 3)
    schedules: tuple[str, ...] = ()
    ordered: tuple[str, ...] = ()
    overlaps: tuple[str, ...] = ()
    degrees: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ("none", "full")
    narrower: tuple[str, ...] = ()
    low_precision: bool = False
    fp8_recipes: tuple[str, ...] = ()
    dispatchers: tuple[str, ...] = ()
    shards_pipelines: bool = False
    sharded_by: str = ""
    offload: tuple[str, ...] = ("none",)
    cpu_offload: str = ""

    @property
    def cuts_sequences(self) -> bool:
        """Whether tensor parallelism may cut what lies between its regions along the sequence."""
        return "sp" in self.degrees

    def levels(self, num_stages: int) -> tuple[int, ...]:
        """Return the levels of sharding for a pipeline of so many stages."""
        if num_stages == 1 or self.shards_pipelines:
            return self.zero
        return tuple(level for level in self.zero if level <= 1)


def offers_of(framework: Framework) -> Offers:
    """Return what a framework ships: of its release where that differs, else of its name.

    Examples
    --------
    >>> from foreshard.catalog.frameworks import load_framework
    >>> 2 in offers_of(load_framework("megatron-core")).zero
    False
    """
    table = shipped("offers.toml")
    return _offers(framework.label if framework.label in table else framework.name)


def running_level(label: str, zero: Any) -> str:
    """Return the framework that runs a level of sharding: another where the same flags switch to it.

    A search may state several levels: then none switches.

    Examples
    --------
    >>> running_level("megatron-core", 1), running_level("megatron-core", 3), running_level("nemo", 3)
    ('megatron-core', 'megatron-fsdp', 'nemo')
    """
    zero = zero[0] if isinstance(zero, tuple) and len(zero) == 1 else zero
    if zero not in (2, 3) or not isinstance(label, str):
        return label
    table = shipped("offers.toml")
    name = label if label in table else label.partition("@")[0]
    if name not in table or zero in _offers(name).zero:
        return label
    return _offers(name).sharded_by or label


def switched(label: str, zero: Any) -> str:
    """Return, in a sentence, which framework runs a level of sharding in place of the stated one; else empty.

    Examples
    --------
    >>> switched("megatron-core", (3,)), switched("megatron-core", 1)
    ('zero 3 of megatron-core is that of megatron-fsdp, which is taken', '')
    """
    runs, level = running_level(label, zero), zero[0] if isinstance(zero, tuple) else zero
    return "" if runs == label else f"zero {level} of {label} is that of {runs}, which is taken"


class Chosen(Protocol):
    """What a plan, or a request for plans, may choose of a framework; None is the framework's own."""

    @property
    def precision(self) -> str:
        """Type of the matrix products."""

    @property
    def fp8_recipe(self) -> str | None:
        """How 8-bit operands are scaled."""

    @property
    def dispatcher(self) -> str | None:
        """What sends tokens to experts on other ranks."""

    @property
    def overrides(self) -> Overrides:
        """What is set otherwise than the framework does."""

    @property
    def compile(self) -> bool | None:
        """Whether torch.compile makes the kernels."""


def as_chosen(
    framework: Framework,
    chosen: Chosen,
    *,
    model: Model,
    devices: Iterable[Device],
    file: str | None = None,
) -> Framework:
    """Return the framework with what a plan or a request sets: recipe, dispatcher, compiler and others.

    Weights in fp32 have gradients in fp32, whatever a framework does in runs of 16 bit.

    Raises
    ------
    SpecError
        Of what the framework does not ship, the devices do not run, or the model and its dtype have no use
        for; with the key of `file`, if any, else the flag.

    Source
    ------
    Megatron-LM d98e8a6 core/distributed/param_and_grad_buffer.py group_params_for_buffers: gradients have the
    dtype of their weights, or fp32.
    """
    _check_use(chosen, model, file)
    devices = tuple(devices)
    if chosen.precision in ("fp32", "tf32"):
        kept, sent = max(framework.grad_bytes, 4), max(framework.grad_reduce_bytes, 4)
        framework = replace(framework, grad_bytes=kept, grad_reduce_bytes=sent)
    framework = replace(framework, **chosen.overrides.stated())
    if _keeps_remainders(framework, chosen):
        framework = replace(framework, master_bytes=2)

    def where(key: str) -> dict[str, Any]:
        return {"key": key if file else f"--{key.replace('_', '-')}", "file": file}

    if (recipe := chosen.fp8_recipe) is not None:
        own = where("fp8_recipe")
        framework = with_recipe(framework, recipe, precision=chosen.precision, devices=devices, **own)
    if chosen.dispatcher is not None:
        framework = with_dispatcher(framework, chosen.dispatcher, devices=devices, **where("dispatcher"))
    if chosen.compile is not None:
        framework = with_compile(framework, chosen.compile, **where("compile"))
    return framework


def _keeps_remainders(framework: Framework, chosen: Chosen) -> bool:
    """Return whether narrow moments leave half of a master weight, the weight being the other half."""
    is_bf16 = chosen.precision == "bf16" or (chosen.precision in LOW_PRECISIONS and not framework.fp8_params)
    moments, masters = chosen.overrides.moment_bytes, chosen.overrides.master_bytes
    is_narrow = moments is not None and moments < 4 and masters is None
    return memory_profile(framework.memory).stores_remainders and is_narrow and is_bf16


_OF_EXPERTS = ("grouped_gemm", "routing")
_OF_NARROW = ("fp8_params", "wide_first", "wide_last")


def _check_use(chosen: Chosen, model: Model, file: str | None) -> None:
    """Refuse what is of experts for a model without any, and of narrow products for a run in 16 bit."""
    stated = chosen.overrides.stated()
    asked = [("dispatcher", "--dispatcher", chosen.dispatcher)]
    asked += [(f"overrides.{name}", "--set", stated.get(name)) for name in _OF_EXPERTS]
    for key, flag, value in asked:
        if value is not None and not any(block.num_experts for block in model.blocks):
            raise SpecError(
                f"{key.removeprefix('overrides.')} {value} for {model.name}, which has no experts",
                key=key if file else flag,
                file=file,
                value=value,
                rule="It says how experts get and compute their tokens",
                fix="Leave it out",
            )
    if chosen.precision in LOW_PRECISIONS:
        return
    for name in _OF_NARROW:
        if stated.get(name):
            raise SpecError(
                f"{name} in {chosen.precision}",
                key=f"overrides.{name}" if file else "--set",
                file=file,
                value=chosen.precision,
                rule=f"It is of runs with products in {', '.join(LOW_PRECISIONS)}",
                fix="Add --dtype fp8, or leave it out",
            )


def with_recipe(
    framework: Framework,
    recipe: str,
    *,
    precision: str,
    devices: Iterable[Device],
    key: str = "--fp8-recipe",
    file: str | None = None,
) -> Framework:
    """Return the framework with the scales of 8-bit operands that were chosen.

    Raises
    ------
    SpecError
        Where products are not in 8 bit, or the framework or a device has no code for the recipe.

    Examples
    --------
    >>> from foreshard.catalog.frameworks import load_framework
    >>> with_recipe(load_framework("nemo"), "tensorwise", precision="fp8", devices=()).fp8_recipe
    'current'
    """
    shipped_ones = offers_of(framework).fp8_recipes
    devices = tuple(devices)
    without = {
        name: [device.name for device in devices if device.arch not in _RUNS.get(name, (device.arch,))]
        for name in (recipe, *shipped_ones)
    }
    if precision != "fp8":
        what, rule = f"{recipe} scales in {precision}", "Recipes are of fp8; mxfp8 is a dtype of its own"
        fix = "Add --dtype fp8, or leave out the recipe"
    elif recipe not in shipped_ones:
        what = f"{framework.label} ships no {recipe} scales"
        rule = f"It ships {', '.join(shipped_ones) or 'no 8-bit recipes to choose from'}"
        labels = [name for name in shipped("offers.toml") if name.startswith(f"{framework.name}@")]
        older = [name for name in labels if recipe in _offers(name).fp8_recipes]
        ways = [f"--framework {older[-1]}"] if older else []
        fix = " or ".join((*(f"Use {name}" for name in shipped_ones[:1]), *ways)) or "Leave it out"
    elif without[recipe]:
        what = f"{recipe} scales on {without[recipe][0]}"
        rule = f"Their products have code for {', '.join(_RUNS[recipe])}"
        others = [name for name in shipped_ones if not without[name]]
        fix = f"Use {others[0]}" if others else "Leave out --dtype fp8"
    else:
        engine = "delayed" in shipped_ones  # TransformerEngine, whose tensorwise scales are 'current' ones
        own = {"delayed": "fused", "tensorwise": "current"}.get(recipe, recipe) if engine else recipe
        return replace(framework, fp8_recipe=own)
    raise SpecError(what, key=key, file=file, value=recipe, rule=rule, fix=fix)


def with_dispatcher(
    framework: Framework,
    dispatcher: str,
    *,
    devices: Iterable[Device],
    key: str = "--dispatcher",
    file: str | None = None,
) -> Framework:
    """Return the framework with what was chosen to send tokens to experts on other ranks.

    Raises
    ------
    SpecError
        Where the framework ships no such dispatcher, or a device has no code for it.

    Examples
    --------
    >>> from foreshard.catalog.frameworks import load_framework
    >>> with_dispatcher(load_framework("megatron-core"), "deepep", devices=()).dispatcher
    'deepep'
    """
    known = offers_of(framework).dispatchers or (framework.dispatcher,)
    without = [device.name for device in devices if device.arch not in _SENDS.get(dispatcher, (device.arch,))]
    if dispatcher in known and not without:
        return replace(framework, dispatcher=dispatcher)
    fix = "Leave it out, or use --framework megatron-core" if len(known) < 2 else f"Use {known[0]}"
    if dispatcher not in known:
        what, rule = f"{framework.label} ships no {dispatcher} dispatcher", f"It ships {', '.join(known)}"
    else:
        what = f"{dispatcher} on {without[0]}"
        rule = f"It has code for {', '.join(_SENDS[dispatcher])}"
    raise SpecError(what, key=key, file=file, value=dispatcher, rule=rule, fix=fix)


def with_compile(
    framework: Framework, compiles: bool, *, key: str = "--compile", file: str | None = None
) -> Framework:
    """Return a framework whose kernels torch.compile makes, or PyTorch runs one by one.

    Compiled, elementwise operations are fused and the host launches what is left of them; backward runs them
    again from what products keep.

    Raises
    ------
    SpecError
        Of a framework with kernels of its own, or one that always compiles.

    Examples
    --------
    >>> from foreshard.catalog.frameworks import load_framework
    >>> with_compile(load_framework("torchtitan"), True).elementwise
    'compiled'
    """
    if framework.elementwise not in _OF_TORCH or framework.memory == "xla":
        always = framework.memory == "xla"
        raise SpecError(
            f"torch.compile under {framework.label}",
            key=key,
            file=file,
            value=compiles,
            rule="Its kernels are made by XLA" if always else "Its kernels are fused by its own code",
            fix="Leave it out, or use --framework torchtitan, hf, ddp or deepspeed",
        )
    name = _OF_TORCH[compiles]
    return replace(framework, elementwise=name, host=name)


def with_units(framework: Framework, plan: Plan, *, file: str | None = None) -> Framework:
    """Return a framework whose FSDP gathers the units that a plan states, as many ahead as it states.

    Raises
    ------
    SpecError
        Where the framework gathers no units of its user's choice, FSDP1 is asked for more than one ahead, or
        the plan has stages that are no units of FSDP.

    Source
    ------
    torch 2.11 distributed/fsdp: _fully_shard/_fully_shard.py (a unit is a module or a list of them;
    set_modules_to_forward_prefetch, set_modules_to_backward_prefetch take any number),
    fully_sharded_data_parallel.py (forward_prefetch_limit and backward_prefetch_limit are 1).
    """
    key, value = ("wrap", plan.wrap) if plan.prefetch is None else ("prefetch", plan.prefetch)
    stages = [stage for group in plan.groups for stage in group.stages]
    fix = "Leave it out, or use --framework torchtitan or hf"
    if framework.fsdp not in ("fsdp1", "fsdp2") or framework.memory == "xla":
        rule = f"Units are chosen of PyTorch's FSDP; {framework.label} does not run it with units of choice"
    elif framework.fsdp == "fsdp1" and (plan.prefetch or 0) > 1:
        rule, fix = "FSDP1 gathers at most one unit ahead", "Use 1, or --framework torchtitan or hf for FSDP2"
    elif any(stage.zero < 2 for stage in stages):
        rule, fix = "Weights are gathered unit by unit at zero 2 and 3", "Use --zero 3, or leave it out"
    elif any(len(group.stages) > 1 for group in plan.groups):
        rule = "Units are chosen for stages that hold the whole model: a pipeline gathers them once a step"
        fix = "Leave it out, or plan without a pipeline"
    else:
        wrap = framework.wrap if plan.wrap is None else 0 if plan.wrap == WHOLE_MODEL else int(plan.wrap)
        if plan.prefetch is None:
            return replace(framework, wrap=wrap)
        # Stated modules are asked for before a layer runs.
        explicit = framework.explicit_prefetch or plan.prefetch > 0
        return replace(framework, wrap=wrap, prefetch=plan.prefetch, explicit_prefetch=explicit)
    raise SpecError(f"{key} {value}", key=key, file=file, value=value, rule=rule, fix=fix)


def not_offered(plan: Plan, framework: Framework) -> tuple[str, ...]:
    """Return a sentence for each choice of a plan that a framework does not let its user make.

    Examples
    --------
    >>> from foreshard.catalog.frameworks import load_framework
    >>> from foreshard.spec.degrees import plan_from_degrees
    >>> plan = plan_from_degrees(8, 4, tp=2, zero=3, seq_len=64)
    >>> not_offered(plan, load_framework("ddp"))
    ('ddp has no tp (it has none)', 'ddp has no zero 3 (it has 0, 1)')
    """
    offers = offers_of(framework)
    found: dict[str, None] = {}

    def expect(word: str, value: object, known: Sequence[object]) -> None:
        if value not in known:
            has = ", ".join(map(str, known)) or "none"
            found[f"{framework.label} has no {word}{value} (it has {has})"] = None

    for group in plan.groups:
        if group.sp and "tp" in offers.degrees and any(stage.tp > 1 for stage in group.stages):
            expect("", "sp", offers.degrees)
        if len(group.stages) > 1 and not offers.schedules:
            found[f"{framework.label} runs no pipelines of stages"] = None
        elif len(group.stages) > 1:
            expect("schedule ", group.schedule, (*offers.schedules, *offers.ordered))
        for stage in group.stages:
            for degree in ("tp", "cp", "ep"):
                if getattr(stage, degree) > 1:
                    expect("", degree, offers.degrees)
            if stage.inner_dp * stage.cp > 1:
                expect("zero ", stage.zero, offers.levels(len(group.stages) if offers.schedules else 1))
            expect("offload ", stage.offload, offers.offload)
    for name in fixed_overlaps(plan, framework):
        found[f"{framework.label} has no switch for {name}"] = None
    return tuple(found)


def fixed_overlaps(plan: Plan, framework: Framework) -> tuple[str, ...]:
    """Return the options of communication that matter to a plan, and that it sets as a framework never does.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from foreshard.catalog.frameworks import load_framework
    >>> from foreshard.spec.degrees import plan_from_degrees
    >>> plan = replace(plan_from_degrees(8, 4, seq_len=64), comm={"param_gather_overlap": True})
    >>> fixed_overlaps(plan, load_framework("deepspeed")), fixed_overlaps(plan, load_framework("nemo"))
    (('param_gather_overlap',), ())
    """
    stages = [stage for group in plan.groups for stage in group.stages]
    experts = any(stage.ep > 1 for stage in stages)
    matters = {
        "tp_overlap": any(stage.tp > 1 for stage in stages),
        "p2p_overlap": any(len(group.stages) > 1 for group in plan.groups),
        "context_gather": any(stage.cp > 1 for stage in stages),
        "expert_overlap": experts,
        "shared_overlap": experts,
        "narrow_gather": plan.precision in LOW_PRECISIONS,
    }
    shards = len(plan.groups) > 1 or any(stage.inner_dp * stage.cp > 1 for stage in stages)
    zero = max(stage.zero for stage in stages)
    return tuple(
        name
        for name, value in plan.comm.items()
        if matters.get(name, shards)
        and name not in offers_of(framework).overlaps
        and bool(value) != bool(framework.hides(name, zero))
    )


def cpu_offload(framework: Framework) -> str:
    """Return the rule of `--offload` that a framework calls CPU offload.

    Raises
    ------
    SpecError
        If the framework has no such switch, or moves what is not modelled.
    """
    offers = offers_of(framework)
    if offers.cpu_offload in offers.offload:
        return offers.cpu_offload
    moved = (
        f"{framework.name} moves weights, gradients and optimizer states together, which is not modelled"
        if offers.cpu_offload
        else f"{framework.name} has no switch of that name"
    )
    fix = "State what is offloaded: optimizer, activations or all"
    raise SpecError(
        "cpu offload",
        key="--offload",
        value="cpu",
        rule=f"Under cpu stands what the framework offloads; {moved}",
        fix=fix,
    )


@cache
def _offers(label: str) -> Offers:
    entry = inherited(label, shipped("offers.toml"))
    entry |= {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    return Offers(**entry)
