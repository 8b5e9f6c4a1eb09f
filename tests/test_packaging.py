"""Wheel, editable install and checkout all import, and Hugging Face's `kernels` can still be imported."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from grpo_fused import engines, fused_linear_logprobs
from grpo_fused.engines import cpu_library, libraries

ROOT = Path(__file__).resolve().parents[1]
# imports the package, and a module of `kernels/` through it
IMPORTS = "import grpo_fused, grpo_fused.kernels as k; print(grpo_fused.__file__); print(list(k.__path__)[0])"


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**_environment(), **env}, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GRPO_FUSED")) and k != "UV"}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the files that git tracks (or would), so that a build leaves no files in the checkout."""
    target = tmp_path_factory.mktemp("source") / "project"
    names = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "grpo_fused", "kernels", "csrc", "MANIFEST.in"]
    target.mkdir()
    run("cp", "-r", *[str(ROOT / name) for name in names], str(target), cwd=ROOT)
    return target


@pytest.fixture(scope="module")
def quick(tmp_path_factory, request) -> dict[str, str]:
    """A compiler that does not optimise: the packed files are the same, and load. No CUDA, which takes minutes.

    The gate, which has just built the extension in place, packs only Python files.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if not request.config.getoption("--full") or compiler is None or platform.machine() != "x86_64":
        return {"GRPO_FUSED_BUILD": "none"}
    script = tmp_path_factory.mktemp("compiler") / "quick-g++"
    script.write_text(f'#!/bin/sh\nexec "{compiler}" "$@" -O0\n')
    script.chmod(0o755)
    return {"CXX": str(script), "GRPO_FUSED_BUILD": "cpu"}


@pytest.fixture(scope="module")
def wheel(source, quick, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), ".")
    run(sys.executable, *command, cwd=source, **quick)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture
def python(tmp_path) -> Path:
    """A new interpreter with this one's packages, without this project."""
    venv.create(tmp_path / "venv", system_site_packages=False, with_pip=False)
    site = next((tmp_path / "venv" / "lib").iterdir()) / "site-packages"
    here = [p for p in sys.path if p.endswith("site-packages")]
    (site / "parent.pth").write_text("\n".join(here))
    return tmp_path / "venv" / "bin" / "python"


def install(python: Path, *what: str, cwd: Path, **env: str) -> None:
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-build-isolation",
        *what, cwd=cwd, **env)  # fmt: skip


def test_wheel_has_one_top_level_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"grpo_fused"}
    for expected in (
        "py.typed",
        "api/fused_linear.py",
        "engines/chunked.py",
        "trainer/loop.py",
        "rewards/format.py",
    ):
        assert f"grpo_fused/{expected}" in names
    assert any(name.startswith("grpo_fused/kernels/") and name.endswith(".py") for name in names)
    assert not any(name.startswith("grpo_fused/kernels/__init__") for name in names)


def test_metadata_name_license_and_addresses(wheel):
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        lines = packed.read(name).decode().splitlines()
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in packed.namelist())
    assert "License-Expression: Apache-2.0" in lines
    assert not any(line.startswith("Classifier: License") for line in lines)  # replaced by the expression
    addresses = {line.split(": ")[1].split(",")[0] for line in lines if line.startswith("Project-URL: ")}
    assert addresses == {"Homepage", "Source", "Issues", "Changelog"}


def test_the_extra_dev_has_what_make_test_installs(wheel):
    """What the gate imports: without tensorboard, tests of trackers fail."""
    rules = re.findall(r"^\$\(VENV\)/\.(?:demo|dev):.*\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    installed = {
        name
        for rule in rules
        for names in re.findall(r"PIP\) ([\w -]+)$", rule, re.MULTILINE)
        for name in names.split()
    }
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        text = packed.read(name).decode()
    offered = set(re.findall(r'^Requires-Dist: ([\w-]+).*; extra == "(?:dev|train|math|peers)"', text, re.MULTILINE))
    assert {"transformers", "pytest"} < installed
    assert installed - {"wheel"} <= offered  # setuptools 77 makes wheels by itself


def test_the_extra_peers_installs_a_trl_that_is_served():
    (trl,) = re.findall(r'"trl>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    source = (ROOT / "grpo_fused/integrations/trl/release.py").read_text()
    major, minor = re.findall(r'^    "(\d+)\.(\d+)":', source, re.MULTILINE)[-1]
    assert trl == ("0.29", f"{major}.{int(minor) + 1}")


def test_import_from_a_wheel(wheel, python, tmp_path):
    install(python, str(wheel), cwd=tmp_path)
    package, kernels = run(str(python), "-c", IMPORTS, cwd=tmp_path).split()
    assert "site-packages" in package
    assert Path(kernels) == Path(package).parent / "kernels"


@pytest.mark.full
@pytest.mark.parametrize("mode", ["lenient", "strict"])
def test_import_from_an_editable_install(source, quick, python, tmp_path, mode):
    install(python, "-e", ".", "--config-settings", f"editable_mode={mode}", cwd=source, **quick)
    _package, kernels = run(str(python), "-c", IMPORTS, cwd=tmp_path).split()
    assert Path(kernels).resolve().name == "kernels"


@pytest.mark.full
def test_import_from_a_checkout(source):
    package, kernels = run(sys.executable, "-c", IMPORTS, cwd=source).split()
    assert Path(package).resolve() == source / "grpo_fused" / "__init__.py"
    assert Path(kernels).resolve() == source / "kernels"


def test_python_lines_of_the_makefile_run(source):
    """Those that heavy targets need first: nothing else in the gate would see a moved module."""
    lines = re.findall(r"python -c '(.*)'", (Path(__file__).parents[1] / "Makefile").read_text())
    assert lines
    for line in lines:
        subprocess.run([sys.executable, "-c", line], cwd=source, check=True)


def test_hugging_face_kernels_is_not_shadowed(source, tmp_path):
    """A regular package of that name elsewhere on the path wins over our folder, also from the checkout's root."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("whose = 'hugging face'")
    code = "import grpo_fused.kernels, kernels; print(kernels.whose)"
    assert run(sys.executable, "-c", code, cwd=source, PYTHONPATH=str(site)).strip() == "hugging face"


def test_import_is_quick_and_quiet(source):
    """Slow modules are imported at first use only; no warning."""
    code = "import sys, torch; before = {*sys.modules}; import grpo_fused; print(*{*sys.modules} - before)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=source, capture_output=True, text=True, env=_environment()
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "torch._dynamo" not in done.stdout.split()
    imported = {name.split(".")[0] for name in done.stdout.split()}
    assert "grpo_fused" in imported
    heavy = {
        "transformers",
        "trl",
        "liger_kernel",
        "peft",
        "accelerate",
        "datasets",
        "matplotlib",
        "tokenizers",
        "yaml",
    }
    assert not imported & heavy


@pytest.mark.full
def test_core_needs_no_optional_package(source):
    """Without triton, transformers, trl and the rest the loss works, and a missing package is an error only in use."""
    code = """
import sys
for name in ("triton", "transformers", "trl", "liger_kernel", "peft", "datasets", "matplotlib", "tqdm", "tokenizers"):
    sys.modules[name] = None
import torch, grpo_fused
hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4)
ids = torch.zeros(2, 3, dtype=torch.int64)
grpo_fused.fused_linear_grpo_loss(hidden, weight, ids, torch.ones(2)).loss.backward()
print(hidden.grad.shape)
"""
    assert "torch.Size([2, 3, 4])" in run(sys.executable, "-c", code, cwd=source)


def setup(source: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", *command], cwd=source, capture_output=True, text=True, timeout=300, check=False,
        env={**_environment(), **env},
    )  # fmt: skip


def test_an_unknown_build_mode_is_refused(source):
    done = setup(source, "--version", GRPO_FUSED_BUILD="gpu")
    assert done.returncode != 0
    assert "GRPO_FUSED_BUILD must be one of auto, none, cpu, cuda; got 'gpu'" in done.stderr


FRESH_PIP = "pip install --force-reinstall --no-deps --no-cache-dir"
NO_COMPILER = {"CXX": "no-such-compiler"}


def test_auto_is_pure_without_a_compiler_and_cpu_gives_the_reason(source):
    done = setup(source, "-q", "build_ext", "--build-lib", "build/none", **NO_COMPILER)
    assert done.returncode == 0, done.stderr
    assert "grpo_fused: without the CPU extension (no C++ compiler (no-such-compiler) was found)" in done.stdout
    done = setup(source, "--version", GRPO_FUSED_BUILD="cpu", **NO_COMPILER)
    assert done.returncode != 0
    assert "GRPO_FUSED_BUILD=cpu: no C++ compiler (no-such-compiler) was found" in done.stderr


HIDE_TORCH = (
    "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'torch' else f(n, *a)"
)
"""As in pip's isolated builds, which remove the environment's packages from the path."""

RUN_SETUP = "import sys; sys.argv = ['setup.py', '-q', 'build_ext']; exec(open('setup.py').read())"


def test_the_cpu_extension_needs_no_torch(source):
    nowhere = (
        "import site; site.getsitepackages = lambda *_: ['/nowhere']; site.getusersitepackages = lambda: '/nowhere'"
    )
    values = "list(WORDS.values()), EXTENSIONS[0].include_dirs, EXTENSIONS[0].depends[-1]"
    code = f"import os; os.environ['CXX'] = ' '; {HIDE_TORCH}; {nowhere}; {RUN_SETUP}; print({values})"
    said = run(sys.executable, "-c", code.replace("'-q', 'build_ext'", "'--version'"), cwd=source)
    words = ["with the CPU extension", "without the CUDA extension (no torch in /nowhere)"]
    assert said.splitlines()[-1] == f"{words} ['csrc'] setup.py"  # new options of the compiler make a new library


@pytest.mark.skipif(libraries.cpu_available() is not None, reason="not built")
def test_the_cpu_library_links_no_torch_and_no_python():
    needed = run("ldd", str(next((ROOT / "grpo_fused").glob("_C.*so"))), cwd=ROOT)
    assert "libstdc++" in needed
    assert "torch" not in needed
    assert "libpython" not in needed


def test_an_isolated_build_finds_torch(source):
    code = f"{HIDE_TORCH}; {RUN_SETUP}; print(find_torch())"
    said = run(sys.executable, "-c", code.replace("'-q', 'build_ext'", "'--version'"), cwd=source)
    assert Path(said.splitlines()[-1]) == Path(torch.__file__).parent


def test_auto_leaves_out_what_does_not_compile(source):
    """A compiler that fails: the install continues, and reports it."""
    fails = shutil.which("false")
    done = setup(
        source, "build", "--build-base", "build/broken", CXX=fails, CC=fails, PATH=str(source)
    )  # no nvcc either
    assert done.returncode == 0, done.stderr
    assert not list((source / "build" / "broken").rglob("*.so"))
    assert "failed" in done.stderr + done.stdout
    line = done.stdout.splitlines()[-1]
    assert line.startswith("grpo_fused: without the CPU extension (it did not compile: see above)")
    assert list((source / "build" / "broken").rglob("layout.py"))


def test_cuda_mode_names_what_is_missing(source):
    done = setup(source, "--version", GRPO_FUSED_BUILD="cuda", PATH=str(source))
    assert done.returncode != 0
    assert "GRPO_FUSED_BUILD=cuda: " in done.stderr


NVCC = """#!/bin/sh
[ "$1" = --list-gpu-code ] && echo sm_75 sm_80 sm_86 sm_87 sm_88 sm_89 sm_90 sm_100 sm_110 sm_103 sm_120 sm_121
echo "$@" > "$0.arguments"
"""


def test_the_cuda_extension_has_code_for_every_gpu(source, tmp_path):
    """nvcc 13.0 compiles for sm_90a, but does not list it."""
    nvcc, nothing = tmp_path / "nvcc", shutil.which("true")
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    done = setup(
        source, "-q", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path),
        GRPO_FUSED_BUILD="cuda", CXX=nothing, CC=nothing, PATH=f"{tmp_path}:{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    arguments = (tmp_path / "nvcc.arguments").read_text()
    assert re.findall(r",code=(\w+)", arguments) == ["sm_80", "sm_90", "sm_100", "compute_100"]


@pytest.mark.full
def test_none_gives_a_pure_wheel(source, tmp_path):
    command = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), ".")
    run(sys.executable, *command, cwd=source, GRPO_FUSED_BUILD="none")
    (built,) = tmp_path.glob("*.whl")
    assert built.name.endswith("py3-none-any.whl")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(built).namelist())


@pytest.mark.full
def test_wheel_holds_the_extension_for_every_python(wheel, python, tmp_path):
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler for x86-64")
    assert "-cp310-abi3-linux" in wheel.name
    assert "grpo_fused/_C.abi3.so" in zipfile.ZipFile(wheel).namelist()
    install(python, str(wheel), cwd=tmp_path)
    code = "from grpo_fused.engines import libraries; print(libraries.cpu_available())"
    assert run(str(python), "-c", code, cwd=tmp_path).strip() == "None"


def test_sdist_holds_all_sources(source, tmp_path):
    done = setup(source, "-q", "sdist", "--dist-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    for path in (ROOT / "csrc").rglob("*.*"):
        assert str(path.relative_to(ROOT)) in held
    assert {"setup.py", "kernels/rows.py", "grpo_fused/engines/libraries.py"} <= held
    assert not any(name.startswith("tests/") for name in held), "they need more than is packed"


@pytest.mark.full
def test_an_import_does_not_initialise_cuda():
    """A process that is forked after that could not use CUDA."""
    code = "import torch; torch.cuda.is_available = lambda: print('asked'); import grpo_fused"
    assert run(sys.executable, "-c", code, cwd=ROOT) == ""


class Installed:
    """A distribution with these files."""

    def __init__(self, origin: dict[str, object] | None, installer: str) -> None:
        self.files = {"direct_url.json": None if origin is None else json.dumps(origin), "INSTALLER": f"{installer}\n"}

    def read_text(self, name: str) -> str | None:
        return self.files[name]


FOLDER, CLONE = {"url": "file:///my%20clone", "dir_info": {}}, {"url": "https://host/g.git"}
ARCHIVE: dict[str, object] = {"url": "file:///dist/g-0.1.0.tar.gz", "archive_info": {}}
CLONE["vcs_info"] = {"vcs": "git", "commit_id": "abc"}
FRESH_UV = "uv pip install --reinstall --no-deps --no-cache"


@pytest.mark.parametrize(
    ("origin", "installer", "expected"),
    [
        pytest.param(FOLDER, "pip", f"GRPO_FUSED_BUILD=cpu {FRESH_PIP} '/my clone'", id="folder"),
        pytest.param(
            FOLDER | {"dir_info": {"editable": True}}, "pip", f"GRPO_FUSED_BUILD=cpu {FRESH_PIP} -e '/my clone'",
            id="editable",
        ),
        pytest.param(CLONE, "pip", f"GRPO_FUSED_BUILD=cpu {FRESH_PIP} git+https://host/g.git@abc", id="git"),
        pytest.param(
            ARCHIVE, "pip", f"GRPO_FUSED_BUILD=cpu {FRESH_PIP} file:///dist/g-0.1.0.tar.gz", id="source archive"
        ),
        pytest.param(
            ARCHIVE | {"url": "file:///dist/g-0.1.0-py3-none-any.whl"}, "pip",
            f"GRPO_FUSED_BUILD=cpu {FRESH_PIP} git+https://github.com/grpo-fused/grpo-fused", id="wheel",
        ),
        pytest.param(
            None, "pip", f"GRPO_FUSED_BUILD=cpu {FRESH_PIP} --no-binary grpo-fused grpo-fused", id="registry"
        ),
        pytest.param(
            FOLDER, "uv", f"GRPO_FUSED_BUILD=cpu {FRESH_UV} '/my clone'", id="uv"
        ),
    ],
)  # fmt: skip
def test_the_command_builds_from_where_the_package_came(origin, installer, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(
        libraries, "__file__", str(tmp_path / "site-packages" / "grpo_fused" / "engines" / "libraries.py")
    )
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _name: Installed(origin, installer))
    assert libraries.build_command() == expected
    monkeypatch.setattr(libraries.shutil, "which", lambda name: "/bin/g++")
    assert libraries._load("_C", cpu_library.load) == f"the CPU extension was not built; to build it: {expected}"
    monkeypatch.setattr(libraries.shutil, "which", lambda name: None)
    reason = "the CPU extension was not built, for which there is no C++ compiler (g++); to build it: "
    assert libraries._load("_C", cpu_library.load) == reason + expected
    assert "GRPO_FUSED_BUILD=cuda " in libraries._load("_C_cuda", torch.ops.load_library)


def test_a_library_of_another_version_is_not_used(tmp_path, monkeypatch):
    before = cpu_library._library
    monkeypatch.setattr(libraries, "__file__", str(tmp_path / "engines" / "libraries.py"))
    empty = tmp_path / "_C.abi3.so"
    run(
        shutil.which("g++") or pytest.skip("no compiler"),
        "-shared",
        "-x",
        "c++",
        "/dev/null",
        "-o",
        str(empty),
        cwd=tmp_path,
    )
    assert "could not be loaded: " in libraries._load("_C", cpu_library.load)
    assert cpu_library._library is before


def test_the_command_installs_a_checkout_in_editable_mode(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _name: Installed(None, "pip"))
    assert libraries.build_command("cuda") == f"GRPO_FUSED_BUILD=cuda {FRESH_PIP} --no-build-isolation -e {ROOT}"


@pytest.fixture
def not_built(monkeypatch):
    monkeypatch.setattr(libraries, "_cpu_reason", "the CPU extension was not built; to build it: make it")
    monkeypatch.setattr(libraries, "_mended_by_a_build", True)
    engines._warn_once.cache_clear()
    yield
    engines._warn_once.cache_clear()


def logprobs(dtype: torch.dtype = torch.float32, impl: engines.Impl = "auto") -> torch.Tensor:
    hidden, weight = torch.ones(2, 3, 4, dtype=dtype), torch.ones(5, 4, dtype=dtype)
    return fused_linear_logprobs(hidden, weight, torch.zeros(2, 3, dtype=torch.int64), impl=impl).logps


def test_auto_warns_once_if_the_extension_would_run(not_built):
    said = "impl='auto' takes chunked, which takes two to four times as long .* not built; to build it: make it"
    with pytest.warns(UserWarning, match=said) as seen:
        assert logprobs().equal(logprobs())
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mended", [True, False], ids=["missing", "unfit"])
def test_auto_does_not_warn_if_a_build_would_not_help(dtype, mended, not_built, monkeypatch):
    """Another implementation was named, the dtype has no native products, or the processor cannot run them."""
    monkeypatch.setattr(libraries, "_mended_by_a_build", mended)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logprobs(dtype, "auto" if dtype == torch.float64 or not mended else "chunked")


def test_the_warning_does_not_break_a_compiled_graph(not_built):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="impl='auto'")
        torch.testing.assert_close(torch.compile(logprobs, fullgraph=True, backend="eager")(), logprobs(impl="chunked"))


def test_workflows_call_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        target
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for command in re.findall(r"\bmake ([a-z -]+)", path.read_text())
        for target in command.split()
    }
    assert called
    assert called <= targets
