"""Writes csrc/ops/attention/cuda/sm80/instances: python3 tools/generate_instances.py. One file for each kernel,
head_dim and tier of shared memory, so that they compile in parallel. Each instantiates the kernel for bf16 and fp16,
with and without a transform of the scores (softcap). The head_dims are those of padded_dims in tiles.h.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "csrc" / "ops" / "attention" / "cuda" / "sm80" / "instances"
HEAD_DIMS = (64, 96, 128, 192, 256)
PAIRS = ((192, 128),)  # head_dim of q and k, and of v
WIDE = 512  # one instance for all scores
DTYPES = ("__nv_bfloat16", "__half")
TRANSFORMS = ("false", "true")


def instance_file(header, functions, transforms=TRANSFORMS, more=""):
    """functions: calls of one dtype and transform, as run_forward<{T}, 64, false, {transform}>; more: parameters."""
    lines = ["// Written by tools/generate_instances.py.", "// clang-format off"]
    lines += [f'#include "ops/attention/cuda/sm80/{header}.cuh"', "", "namespace packing_ops::attention::sm80 {", ""]
    for dtype in DTYPES:
        for function in functions:
            for transform in transforms:
                instance = function.format(T=dtype, transform=transform)
                lines.append(f"template void {instance}(const Args&, cudaStream_t{more});")
    return "\n".join([*lines, "", "}  // namespace packing_ops::attention::sm80", ""])


def tiers(head_dim):
    """KB of shared memory that the backward has instances for, as tiles.h says: has_99kb_tier."""
    return (163, 227) if head_dim == 64 else (99, 163, 227)


def single_tiers(head_dim):
    """Those of documents of one key tile: backward_single_tier."""
    return [tier for tier in tiers(head_dim) if tier != 227 or head_dim == 256]


def wide_instances():
    """{file name: text} of head_dim 512."""
    files = {}
    for tier in tiers(WIDE):
        name = f"SmemTier::k{tier}KB"
        if tier != 227:
            files[f"forward_wide_smem{tier}.cu"] = instance_file(
                "forward_wide", [f"run_forward_wide<{{T}}, {name}>"], ["true"]
            )
        files[f"backward_{WIDE}_smem{tier}.cu"] = instance_file(
            "backward", [f"run_backward<{{T}}, {WIDE}, {{transform}}, {name}>"], ["true"]
        )
    return files


def instances():
    """{file name: text}"""
    files = wide_instances()
    for dim, dim_v in (*((dim, dim) for dim in HEAD_DIMS), *PAIRS):
        label, of_v = (f"{dim}", "") if dim == dim_v else (f"{dim}_{dim_v}", f", {dim_v}")
        short = dim <= 128  # has_short_forward
        kinds = ("false", "true") if short else ("false",)
        files[f"forward_{label}.cu"] = instance_file(
            "forward", [f"run_forward<{{T}}, {dim}, {kind}, {{transform}}{of_v}>" for kind in kinds], more=", bool"
        )
        if short:
            files[f"forward_resident_{label}.cu"] = instance_file(
                "forward_resident", [f"run_forward_resident<{{T}}, {dim}, {{transform}}>"]
            )
        for tier in tiers(dim):
            name = f"SmemTier::k{tier}KB"
            files[f"backward_{label}_smem{tier}.cu"] = instance_file(
                "backward", [f"run_backward<{{T}}, {dim}, {{transform}}, {name}{of_v}>"]
            )
            if tier not in single_tiers(dim):
                continue
            keys = ["backward_keys", "backward_small_keys"] if short and tier != 99 else ["backward_keys"]
            files[f"backward_single_{label}_smem{tier}.cu"] = instance_file(
                "backward_single",
                [
                    f"run_backward_single<{{T}}, {dim}, {key}({dim}, {name}), {{transform}}, {name}{of_v}>"
                    for key in keys
                ],
            )
    return files


def write(folder=FOLDER):
    folder.mkdir(exist_ok=True)
    files = instances()
    for path in folder.glob("*.cu"):
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    write()
