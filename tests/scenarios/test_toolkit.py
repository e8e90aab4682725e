"""The CUDA toolkit that an engine's lock brings compiles and links kernels, on a machine that has no other and no GPU.

The wheels are those of the lock, installed by the role's own code; nvcc is found on the PATH of the role's unit, as
SGLang's kernels, tvm-ffi and FlashInfer find it: the folder above its own is CUDA_HOME.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "module_utils"))
sys.path.insert(0, str(ROOT / "rehearsal"))

import fleet  # noqa: E402 - found by the lines above
from dflash_fleet import venvs  # noqa: E402

LOCKS = ROOT / "roles/sglang_venv/files/locks"
PARTS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime", "pip")
# CCCL's headers compare the compiler's release with that of the runtime's headers, and stop the compilation.
KERNEL = """
#include <cuda/std/type_traits>
#include <cuda_runtime.h>
__global__ void add(float *x) { x[threadIdx.x] += 1.f; }
extern "C" int launch(float *x) { add<<<1, 32>>>(x); return static_cast<int>(cudaGetLastError()); }
extern "C" int runtime() { int version = 0; cudaRuntimeGetVersion(&version); return version; }
"""

pytestmark = pytest.mark.faults


def unit_path(environment: Path) -> str:
    """PATH as the role's unit sets it."""
    template = (ROOT / "roles/sglang_service/templates/unit.service.j2").read_text()
    (line,) = re.findall(r"^Environment=PATH=(.*)$", template, re.M)
    return str(line.replace("{{ __sglang_service_venv }}", str(environment)))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the compiler's packages of the newest lock, made as on a host."""
    if shutil.which("c++") is None:
        fleet.apt_install(["g++"])
    folder = tmp_path_factory.mktemp("toolkit")
    requirements = "".join(
        f"{one.name}=={one.version} " + " ".join(f"--hash=sha256:{digest}" for digest in one.hashes) + "\n"
        for one in venvs.parse_requirements((LOCKS / "sglang-0.5.23-cuda-cp311.txt").read_text())
        if one.name in PARTS
    )
    (folder / "requirements.txt").write_text(requirements)
    wheels = folder / "wheels"
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "-d", str(wheels)]
    subprocess.run([*download, "--only-binary=:all:", "-r", str(folder / "requirements.txt")], check=True)
    interpreter = venvs.find_interpreter(sys.executable)
    # Checked as whoever runs this test: its interpreter may stand in a home directory.
    user = pwd.getpwuid(os.geteuid()).pw_name
    mark = venvs.build(folder / "venvs", requirements, interpreter, wheels, name="toolkit", user=user)
    assert mark["cuda_toolkit"].startswith("13.0.")
    return folder / "venvs" / mark["id"]


def test_a_kernel_is_compiled_linked_and_loaded(environment: Path, tmp_path: Path) -> None:
    path = unit_path(environment)
    nvcc = shutil.which("nvcc", path=path)
    assert nvcc == str(environment / "cuda/bin/nvcc")
    home = Path(nvcc).parent.parent
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    assert "release 13.0" in said
    (tmp_path / "kernel.cu").write_text(KERNEL)
    for command in (
        [nvcc, "-std=c++20", "-Xcompiler", "-fPIC", "-gencode=arch=compute_120,code=sm_120", "-c", "kernel.cu"],
        ["c++", "kernel.o", "-shared", f"-L{home}/lib64", "-lcudart", "-o", "kernel.so"],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    # In a process of its own, torch has loaded the runtime of the same wheel before.
    ctypes.CDLL(str(home / "lib64/libcudart.so"), mode=ctypes.RTLD_GLOBAL)
    assert ctypes.CDLL(str(tmp_path / "kernel.so")).runtime() == 13000
