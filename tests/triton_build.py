"""Compiles the launches of a site for GPUs that are not here, and reads from the machine code what they would use.

    python triton_build.py '{"target": "sm_90", "sites": [{"n": 4}]}'

prints a row for every kernel as JSON. A process of its own: a kernel is interpreted or compiled.
"""

import collections
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import cases
import temper
from temper.ops.gpu import check, fold_launch, launch, tiles

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int8: "*i8"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def launches_of(target, n, mixer="sinkhorn", generator="cp", dtype="bfloat16", dim=1024, tokens=4096):
    """Every launch of a site, unchained and chained, on the meta device; each kernel once."""
    tiles.elsewhere = target
    tiles._target.cache_clear()
    with torch.device("meta"):
        config = temper.preset("mhc", num_streams=n, dim=dim, generator=generator, mixer=cases.MIXERS[mixer])
        site = temper.HyperConnection(config)
    spec, kind = site.spec, getattr(torch, dtype)

    def new(*shape, kind=torch.float32):
        return torch.empty(shape, dtype=kind, device="meta")

    shape = (tokens, n, dim)
    case = {"streams": new(*shape, kind=kind), "y": new(tokens, dim, kind=kind)}
    case |= {"in_map": new(spec.num_rows, n, dim), "out": new(sum(spec.map_sizes)), "bias": new(sum(spec.head_logits))}
    case |= {"grad": new(*shape, kind=kind), "d_x": new(tokens, dim, kind=kind)}
    case |= {"d_weights": new(tokens, spec.num_weights)}
    raw = [tensor for owner in (site.norm, site.pre, site.res, site.post) for tensor in owner.stored()]
    folded = [case[name] for name in ("in_map", "out", "bias")]
    with launch.recorded() as found:
        check.results(case, spec)
        launch.mix(new(tokens, *site.mixer.logit_shape), spec)
        launch.mix_backward(new(tokens, *site.mixer.logit_shape), new(tokens, n, n), new(tokens, n, n), spec)
        fold_launch.fold(raw, spec.generators, folded)
        fold_launch.fold_backward(*folded, raw, spec.generators, raw)
    return list({entry.kernel: entry for entry in reversed(found)}.values())


def source_of(entry):
    """What the just-in-time compiler would be given."""
    kernel, arguments = launch.resolve(entry)
    signature, constants, attributes = {}, {}, {}

    def describe(value, path):
        if value is None:
            constants[path] = None
            return "constexpr"
        if isinstance(value, tuple):
            return tuple(describe(part, (*path, k)) for k, part in enumerate(value))
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype]
        if not kernel.params[path[0]].do_not_specialize:
            if value == 1:
                constants[path] = 1
                return "constexpr"
            if value % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
        return "i32"

    for k, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            constants[(k,)] = value
            signature[parameter.name] = "constexpr"
        else:
            signature[parameter.name] = describe(value, (k,))
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


# Rows by source: sites share most of their kernels.
_built = {}


def build(entry, target):
    """A row with what the kernel would use on the target."""
    source = source_of(entry)
    key = (target, entry.kernel, source.hash(), entry.warps, entry.stages)
    if key not in _built:
        _built[key] = _build(entry, source, target)
    return _built[key]


def _build(entry, source, target):
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    options = {"num_warps": entry.warps, "num_stages": entry.stages}
    done = triton.compile(source, target=gpu, options=options)
    row = {"kernel": entry.kernel, "target": target, "shared": done.metadata.shared, "warps": entry.warps}
    names = {(k,): parameter.name for k, parameter in enumerate(source.fn.params) if not parameter.is_constexpr}
    row["ones"] = [names[path] for path, value in source.constants.items() if path in names and value == 1]
    row["precisions"] = sorted(set(re.findall(r"inputPrecision = (\w+)", done.asm["ttir"])))
    if "cubin" not in done.asm:
        text = done.asm["amdgcn"]
        found = {key: int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in _AMD}
        spills = found["vgpr_spill_count"] + found["sgpr_spill_count"]
        atomics = len(re.findall(r"(?:global|flat|buffer)_atomic", text))
        return row | {"registers": found["vgpr_count"], "spills": spills, "atomics": atomics, "tf32": 0}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    found = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    instruction = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)"
    kinds = collections.Counter(re.findall(instruction, code, re.M))
    spills = int(found["STACK"]) + kinds["STL"] + kinds["LDL"]
    # In shared memory atomics are barriers of the pipeline; those in global memory would make sums depend on timing.
    atomics = sum(kinds[name] for name in ("ATOM", "ATOMG", "RED", "REDG"))
    tf32 = len(re.findall("tf32", done.asm["ptx"]))
    return row | {"registers": int(found["REG"]), "spills": spills, "atomics": atomics, "tf32": tf32}


_AMD = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")


def _run(tool, *arguments):
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def main(target, sites):
    rows = []
    for site in sites:
        for entry in launches_of(target, **site):
            try:
                rows.append({"site": site, **build(entry, target)})
            except Exception as error:
                while error.__cause__ is not None:
                    error = error.__cause__
                rows.append({"site": site, "kernel": entry.kernel, "target": target, "error": str(error)[-500:]})
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(main(**json.loads(sys.argv[1])), sys.stdout)
